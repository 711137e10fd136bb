"""The layout of the code: a file uses only floors below its own, and nothing outgrows its place."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
BELOW = {  # what a file of each floor may include, besides system headers
    "third_party": {"third_party"},
    "core": {"core"},
    "cpu": {"cpu", "core"},
    "cuda": {"cuda", "core"},
    "ops": {"ops", "cpu", "cuda", "core"},
    "binding": {"binding", "ops", "cpu", "cuda", "core", "third_party"},
}
PYTHON_HEADERS = {"Python.h", "numpy/arrayobject.h", "structmember.h"}
FRAMEWORKS = {"torch", "jax", "tensorflow", "transformers", "vllm", "sglang", "modelopt", "cupy"}
MAX_LINES = 800
MAX_LINES_OF_A_KERNEL = 1500
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)

C_FILES = sorted(path for path in CSRC.rglob("*") if path.suffix in {".c", ".h", ".cu", ".cuh"})
PYTHON_FILES = sorted([*(ROOT / "moqext").rglob("*.py"), *(ROOT / "moqext").rglob("*.pyi")])
FRAMEWORK_FILES = sorted((ROOT / "python").rglob("*.py"))


def name(path):
    return str(path.relative_to(ROOT))


def imports(path):
    """Every dotted module name that a Python file imports, at any depth; `from a import b` gives a.b."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from (f"{base}.{alias.name}" for alias in node.names)


def forbidden_includes(floor, text):
    """The includes of a C file of `floor` that reach above it."""
    for bracket, header in INCLUDE.findall(text):
        if bracket == "<":
            if header in PYTHON_HEADERS and floor != "binding":
                yield header
        elif header.split("/")[0] not in BELOW[floor]:
            yield header


def mutable_statics(text):
    """Variables of static storage that can change: `static` without const, and not a function."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\])*\"", '""', text, flags=re.DOTALL)
    for match in re.finditer(r"^[ \t]*static\b([^;{(=]*)([;{(=])", text, re.MULTILINE):
        declaration, end = match.groups()
        if end != "(" and not re.search(r"\bconst(expr)?\b|\binline\b", declaration):
            yield declaration.strip()


def test_there_is_something_to_check():
    assert {path.parent.name for path in C_FILES} >= {"core", "binding", "cuda"}
    assert PYTHON_FILES


def test_the_checks_see_violations():
    assert list(forbidden_includes("core", '#include "ops/plan.h"\n#include <Python.h>\n')) == [
        "ops/plan.h",
        "Python.h",
    ]
    assert list(forbidden_includes("cpu", '#include "cuda/cuda.h"')) == ["cuda/cuda.h"]
    assert list(forbidden_includes("binding", '#include "ops/plan.h"\n#include <Python.h>\n')) == []
    assert list(
        mutable_statics(
            "static int n;\nstatic const int m = 1;\nstatic constexpr int k = 1;\nstatic int f(void) {\n}"
        )
    ) == ["int n"]
    assert list(mutable_statics("    static PyObject *cached = NULL;")) == ["PyObject *cached"]
    assert list(mutable_statics("static const char *const NAMES[] = {")) == []


@pytest.mark.parametrize("path", C_FILES, ids=name)
def test_includes_point_down(path):
    floor = path.relative_to(CSRC).parts[0]
    assert list(forbidden_includes(floor, path.read_text())) == []


NEUTRAL = [  # what every operation uses; core/linear.h has the types of parameters and devices
    *(
        CSRC / "ops" / f"{name}.{end}"
        for name in ("plan", "tune", "tune_memory", "job", "params")
        for end in "ch"
    ),
    *(CSRC / "binding" / f"{name}.{end}" for name in ("call", "mapping", "plan_object") for end in "ch"),
]


@pytest.mark.parametrize("path", NEUTRAL, ids=name)
def test_the_rules_and_the_path_of_a_call_know_no_operation(path):
    text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
    assert re.findall(r"\bmoq_linear_\w+|\bMOQ_LINEAR\b", text) == []
    assert {header for _, header in INCLUDE.findall(text) if "linear" in header} <= {"core/linear.h"}


ROOMS = {  # of csrc/cuda: the rooms that a file of each may include from, besides its own
    "choice": set(),
    "runtime": set(),
    "device": set(),
    "tensor": {"device", "runtime"},
    "linear": {"device", "runtime", "tensor", "choice"},
    "moe": {"device", "runtime", "tensor", "linear", "choice"},
}
CUDA_FILES = [path for path in C_FILES if path.is_relative_to(CSRC / "cuda")]


def room_of(path):
    """The room of csrc/cuda that a file belongs to, the first folder below it; None for its own files."""
    parts = Path(path).parts
    return parts[1] if len(parts) > 2 else None


@pytest.mark.parametrize("path", [path for path in CUDA_FILES if room_of(path.relative_to(CSRC))], ids=name)
def test_rooms_of_cuda_use_the_rooms_below(path):
    room = room_of(path.relative_to(CSRC))
    headers = [header for _, header in INCLUDE.findall(path.read_text()) if header.startswith("cuda/")]
    assert {room_of(header) for header in headers} - {room, None} <= ROOMS[room]
    assert [header for header in headers if not room_of(header) and header != "cuda/cuda.h"] == []


def test_choices_are_made_without_cuda():
    """csrc/cuda/choice is plain C in every build: no kernel, no header of CUDA, none that includes one."""
    files = [path for path in CUDA_FILES if room_of(path.relative_to(CSRC)) == "choice"]
    assert {path.suffix for path in files} == {".c", ".h"}
    for path in files:
        headers = [header for bracket, header in INCLUDE.findall(path.read_text()) if bracket == '"']
        assert [header for header in headers if not header.startswith(("core/", "cuda/choice/"))] == []


SEARCH = re.compile(  # what compares ways, as csrc/cuda/choice names it
    r"\bmoq_(?:cuda|cublaslt)\w*_(?:seconds|choose)\b|\bmoq_cuda_\w+_variants\b|\bmoq_\w+_find_\w*config\b"
)


def searches(text):
    """The names in a file of kernels that find a way again, instead of laying out the one that was found."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    return SEARCH.findall(text) + [header for _, header in INCLUDE.findall(text) if header == CHOICES]


CHOICES = "cuda/choice/choice.h"


def test_searches_are_seen():
    for name_of_search in (
        *("moq_cuda_fp8_prefill_choose", "moq_cuda_nvfp4_decode_seconds", "moq_cublaslt_seconds"),
        *(
            "moq_cuda_nvfp4_medium_variants",
            "moq_nvfp4_fp8_find_config",
            "moq_cuda_fp8_prefill_config_seconds",
        ),
    ):
        assert searches(f"x = {name_of_search}(spec, m);") == [name_of_search]
    assert searches(f'#include "{CHOICES}"\n') == [CHOICES]
    assert (
        searches("way = moq_fp8_prefill_expand_config(call); moq_cublaslt_variants(call); /* _choose */")
        == []
    )


def test_names_of_searches_are_those_of_the_choice():
    """Every function that the choice offers to the plan is one that a kernel may not use."""
    declared = re.findall(r"\bmoq_\w+(?=\()", (CSRC / CHOICES).read_text())
    assert len(declared) > 20
    assert [function for function in declared if not SEARCH.fullmatch(function)] == []


@pytest.mark.parametrize(
    "path", [path for path in CUDA_FILES if room_of(path.relative_to(CSRC)) != "choice"], ids=name
)
def test_kernels_are_handed_their_way(path):
    """Found by the plan, it was looked for twice more in each call: for the workspace, and for the launch."""
    if path.name != "absent.c":
        assert searches(path.read_text()) == []


KERNEL_FILES = [  # what nvcc alone compiles of kernels; their other headers are C, with names of moq_
    path
    for path in CUDA_FILES
    if room_of(path.relative_to(CSRC)) in {"device", "tensor", "linear"}
    and not (path.suffix == ".h" and "__cplusplus" in path.read_text())
]


def statements(text, space=""):
    """(namespace, statement) of a C++ file, bodies left out: `struct a {}`, `static void f(int x) {}`."""
    if not space:
        text = re.sub(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\])*\"", "", text, flags=re.DOTALL)
        text = re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", "", text, flags=re.MULTILINE)
    head, depth, body = "", 0, ""
    for part in re.findall(r"[{};]|[^{};]+", text):
        depth -= part == "}"
        if depth:
            body += part
        elif part == "}":
            inner = re.search(r"\bnamespace ([\w:]+)\s*$", head)
            if inner:
                yield from statements(body, f"{space}::{inner[1]}".strip(":"))
            head += "{}"
        elif part not in "{;":
            head += part
        depth += part == "{"
        body = body if depth else ""
        is_function = re.search(r"\)\s*(?:\[[^\]]*\]\s*)?\{\}$", head)
        if not depth and (part == ";" or (part == "}" and (is_function or inner))):
            yield space, " ".join(head.split())
            head = ""


def names_with_linkage(text):
    """(namespace, name) of what a C++ file defines for all files: types, and templates, even static.

    Two files that define one name of a namespace differently make a program that means nothing, and no
    compiler says so. Declarations and specializations are of what is defined elsewhere.
    """
    for space, statement in statements(text):
        own = re.sub(r"__\w+__\(.*?\)\)? ", "", statement)
        is_template = own.startswith("template")
        own = re.sub(r"^template <.*?> (?=(static|struct|using|const|__)\b|__)", "", own)
        found = re.search(r"^(?:struct|class|union|enum) (\w+) ?\{\}$|^using (\w+) =", own)
        found = found or re.search(r"^typedef\b.*?(\w+)(?:\[\w+\])?$", own)
        if is_template and own.endswith("{}"):
            found = found or re.search(r"^[^(]*?(?:\(&)?(?<!::)(?<!\w)(\w+)\((?!\))?", own)
        if found:
            yield space, next(name for name in found.groups() if name)


def test_the_names_of_kernels_are_seen():
    text = """
    #define A typedef struct { int x; } no;
    struct bare { int x; };
    namespace moq::a {
    typedef struct { int x; } pair; /* struct no { }; */
    typedef enum { ONE } kind;
    template <int N> struct chunk { int y; void go() { if (N) { } } };
    template <> struct chunk<1> { };
    template <class S> static float (&half(S x))[2] { return x.half; }
    template <class S> static void add(S (&sum)[2], int x) { for (;;) { } }
    template <class S> static __global__ void __launch_bounds__(f(1), 1) run(S s) { }
    static int plain(int x) { return x; }
    struct later;
    typedef kind other;
    }
    """
    assert set(names_with_linkage(text)) == {("", "bare")} | {
        ("moq::a", name) for name in ("pair", "kind", "chunk", "half", "add", "run", "other")
    }


def test_the_names_of_kernels_stand_in_namespaces_once():
    places = {}
    for path in KERNEL_FILES:
        for where in set(names_with_linkage(path.read_text())):
            places.setdefault(where, []).append(name(path))
    assert [where for where in places if not where[0].startswith("moq")] == []
    assert {where: files for where, files in places.items() if len(files) > 1} == {}
    assert len(places) > 300


def test_includes_stand_before_all_else():
    """An include in the middle of a file lets the header take names of it, and not say what it needs."""
    for path in CUDA_FILES:
        text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
        before = text[: text.rindex("#include")] if "#include" in text else ""
        code = [line for line in before.splitlines() if line and not re.match(r"#|extern \"C\" \{", line)]
        assert code == [], name(path)


OWN_FILES = [path for path in C_FILES if "third_party" not in path.parts]


FOREIGN = {"cublasLt.h", "cublas_api.h", "library_types.h", "Python.h", "fuzz_NAME.c"}  # named, and not ours


@pytest.mark.parametrize(
    "path",
    [*OWN_FILES, *(ROOT / "docs").rglob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "README.md"],
    ids=name,
)
def test_files_that_are_named_exist(path):
    known = {file.name for file in [*C_FILES, *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]}
    known |= FOREIGN
    text = INCLUDE.sub("", path.read_text())
    named = re.findall(r"[\w/-]+\.(?:cuh|cu|md|c|h)\b", text)
    assert {file.split("/")[-1] for file in named} - known == set()
    assert [file for file in named if file.startswith("docs/") and not (ROOT / file).is_file()] == []


@pytest.mark.parametrize("path", OWN_FILES, ids=name)
def test_c_file_is_short(path):
    is_kernel = path.suffix == ".cu" and path.is_relative_to(CSRC / "cuda")
    limit = MAX_LINES_OF_A_KERNEL if is_kernel else MAX_LINES
    assert len(path.read_text().splitlines()) <= limit


@pytest.mark.parametrize("path", [*PYTHON_FILES, *FRAMEWORK_FILES, ROOT / "setup.py"], ids=name)
def test_python_file_is_short(path):
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", PYTHON_FILES, ids=name)
def test_the_package_imports_no_framework(path):
    roots = {module.split(".")[0] for module in imports(path)}
    assert roots & FRAMEWORKS == set()


@pytest.mark.parametrize("path", [p for p in PYTHON_FILES if p.name != "_C.pyi"], ids=name)
def test_the_package_does_not_import_what_is_above_it(path):
    roots = {module.split(".")[0] for module in imports(path)}
    assert not any(root.startswith("moqext_") for root in roots)


def test_reference_is_independent():
    """moqext.reference is what the C code is compared with, so it uses nothing else of moqext."""
    files = [
        path for path in PYTHON_FILES if path.relative_to(ROOT / "moqext").parts[0].startswith("reference")
    ]
    for path in files:
        own = {
            m for m in imports(path) if m.split(".")[0] == "moqext" and not m.startswith("moqext.reference")
        }
        assert own == set(), name(path)


def test_framework_packages_use_public_names():
    """python/ never imports moqext._C, and imports frameworks lazily: not at the top of a package."""
    for path in FRAMEWORK_FILES:
        assert not any(module.startswith("moqext._C") for module in imports(path)), name(path)


PROCESS_WIDE = {
    "csrc/cpu/interrupt.c",
    "csrc/cpu/isa.c",
    "csrc/cpu/openmp.c",
    "csrc/cpu/scratch.c",
    "csrc/cpu/threads.c",
}  # facts of the machine and of the process
STATE_OF_THE_DRIVER = {  # what CUDA keeps for the process, remembered for it: the variables allowed
    "csrc/cuda/runtime/cublaslt.cu": {"cublaslt_state"},  # the library and its handles, under a lock
    "csrc/cuda/runtime/cublaslt_matmul.cu": {"kept_algorithms"},  # what it proposed, under a lock
    # devices and their contexts, under a lock; of a thread: the device that it has entered
    "csrc/cuda/runtime/devices.cu": {"device_table", "entered_device"},
    "csrc/cuda/runtime/driver.cu": {"found_driver"},  # entry points, under a lock
    "csrc/cuda/runtime/launch.cu": {"process_facts", "kernel_table"},  # two switches; handles, under a lock
    "csrc/cuda/runtime/pdl.cu": {"last_launch"},  # of a thread: the end of the stream that it launched in
    "csrc/cuda/tensor/cuda_prepare.cu": {"notebook"},  # memory that kernels and the host see, under a lock
}


@pytest.mark.parametrize(
    "path", [p for p in C_FILES if "third_party" not in p.parts and name(p) not in PROCESS_WIDE], ids=name
)
def test_no_mutable_statics(path):
    """State lives in the module and in its objects, but for the tables that CPython wants to be static."""
    tables = re.compile(r"PyMethodDef|PyModuleDef|PyType_Slot|PyType_Spec|PyMemberDef|PyGetSetDef")
    found = [text for text in mutable_statics(path.read_text()) if not tables.search(text)]
    allowed = STATE_OF_THE_DRIVER.get(name(path), set())
    assert {text.split()[-1].lstrip("*") for text in found} == allowed
