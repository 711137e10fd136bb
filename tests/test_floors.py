"""The layout of the code: a file uses only floors below its own, and nothing outgrows its place."""

import ast
import re
from functools import cache
from pathlib import Path

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


@cache
def read(path):
    return path.read_text()


@cache
def code_of(path):
    """A C file without its comments."""
    return re.sub(r"/\*.*?\*/", "", read(path), flags=re.DOTALL)


def includes(path):
    return [header for _, header in INCLUDE.findall(read(path))]


def offenders(paths, find):
    """Finds per file what `find` lists, by the file's name; a file without any is left out."""
    return {name(path): found for path in paths if (found := list(find(path)))}


@cache
def imports(path):
    """Every dotted module name that a Python file imports, at any depth; `from a import b` gives a.b."""
    found = []
    for node in ast.walk(ast.parse(read(path), str(path))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            found += [f"{base}.{alias.name}" for alias in node.names]
    return found


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


def test_includes_point_down():
    assert offenders(C_FILES, lambda p: forbidden_includes(p.relative_to(CSRC).parts[0], read(p))) == {}


NEUTRAL = [  # what every operation uses; core/linear.h has the types of parameters and devices
    *(
        CSRC / "ops" / f"{name}.{end}"
        for name in ("plan", "tune", "tune_memory", "job", "params")
        for end in "ch"
    ),
    *(CSRC / "binding" / f"{name}.{end}" for name in ("call", "mapping", "plan_object") for end in "ch"),
]


def test_the_rules_and_the_path_of_a_call_know_no_operation():
    def of_linears(path):
        yield from re.findall(r"\bmoq_linear_\w+|\bMOQ_LINEAR\b", code_of(path))
        yield from (header for header in includes(path) if "linear" in header and header != "core/linear.h")

    assert offenders(NEUTRAL, of_linears) == {}


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


def test_rooms_of_cuda_use_the_rooms_below():
    def of_other_rooms(path):
        room = room_of(path.relative_to(CSRC))
        for header in includes(path):
            in_rooms = header.startswith("cuda/") and header != "cuda/cuda.h"
            if in_rooms and room_of(header) not in ROOMS[room] | {room}:
                yield header

    assert offenders([path for path in CUDA_FILES if room_of(path.relative_to(CSRC))], of_other_rooms) == {}


def test_choices_are_made_without_cuda():
    """Choices and rows of kernels are plain C in every build: no header of CUDA, none that includes one."""
    choice = [path for path in CUDA_FILES if room_of(path.relative_to(CSRC)) == "choice"]
    assert {path.suffix for path in choice} == {".c", ".h"}
    rows = [path for path in CUDA_FILES if path.suffix == ".c" and path.name != "absent.c"]
    headers = {CSRC / header for path in rows for header in includes(path) if header.startswith("cuda/")}

    def of_other_places(path):
        beside = f"{path.relative_to(CSRC).parent}/"
        own = [header for bracket, header in INCLUDE.findall(read(path)) if bracket == '"']
        return [header for header in own if not header.startswith(("core/", "cuda/choice/", beside))]

    assert offenders({*choice, *rows, *headers}, of_other_places) == {}


def test_every_kernel_is_listed_once():
    """A row that choice/families.h does not name would be dead, and no compiler says so."""
    listed = re.findall(r"^    X\((\w+)\)", read(CSRC / "cuda/choice/families.h"), re.MULTILINE)
    rows = [path for path in CUDA_FILES if path.suffix == ".c"]
    text = "\n".join(read(path) for path in rows)
    plain = re.findall(r"^const moq_(?:linear|moe)_kernel MOQ_(?:LINEAR|MOE)_(\w+) =", text, re.MULTILINE)
    made = re.findall(r"^FAMILY\((\w+),", text, re.MULTILINE)
    assert sorted(listed) == sorted([*plain, *made])


SEARCH = re.compile(r"\bmoq_(?:find|try|choose)_config\b|\bmoq_configs?_\w+\b")
"""Functions that compare configs, as csrc/cuda/choice names them."""


def searches(text):
    """The names in a file of kernels that find a way again, instead of laying out the one that was found."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    return SEARCH.findall(text) + [header for _, header in INCLUDE.findall(text) if header in CHOICES]


CHOICES = ("cuda/choice/family.h", "cuda/choice/search.h", "cuda/choice/rates.h")


def test_searches_are_seen():
    for name_of_search in ("moq_find_config", "moq_choose_config", "moq_try_config", "moq_configs_near"):
        assert searches(f"x = {name_of_search}(spec, m);") == [name_of_search]
    for header in CHOICES:
        assert searches(f'#include "{header}"\n') == [header]
    assert (
        searches("way = moq_fp8_prefill_expand_config(call); moq_cublaslt_variants(call); /* _choose */")
        == []
    )


def test_names_of_searches_are_those_of_the_choice():
    """Every function that the choice offers to the plan is one that a kernel may not use."""
    declared = re.findall(r"\bmoq_\w+(?=\()", (CSRC / "cuda/choice/search.h").read_text())
    assert len(declared) >= 5
    assert [function for function in declared if not SEARCH.fullmatch(function)] == []


def test_kernels_are_handed_their_config():
    """Found by the plan, it was looked for twice more in each call: for the workspace, and for the launch."""
    files = [path for path in CUDA_FILES if room_of(path.relative_to(CSRC)) != "choice"]
    assert offenders([path for path in files if path.suffix != ".c"], lambda p: searches(read(p))) == {}


KERNEL_FILES = [  # what nvcc alone compiles of kernels; their other headers are C, with names of moq_
    path
    for path in CUDA_FILES
    if room_of(path.relative_to(CSRC)) in {"device", "tensor", "linear"}
    and not (path.suffix == ".c" or (path.suffix == ".h" and "__cplusplus" in read(path)))
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
        for where in set(names_with_linkage(read(path))):
            places.setdefault(where, []).append(name(path))
    assert [where for where in places if not where[0].startswith("moq")] == []
    assert {where: files for where, files in places.items() if len(files) > 1} == {}
    assert len(places) > 300


def test_includes_stand_before_all_else():
    """An include in the middle of a file lets the header take names of it, and not say what it needs."""

    def code_before(path):
        before = code_of(path).rpartition("#include")[0]
        return [line for line in before.splitlines() if line and not re.match(r"#|extern \"C\" \{", line)]

    assert offenders(CUDA_FILES, code_before) == {}


OWN_FILES = [path for path in C_FILES if "third_party" not in path.parts]


FOREIGN = {"cublasLt.h", "cublas_api.h", "library_types.h", "Python.h", "fuzz_NAME.c"}  # named, and not ours


PAGES = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]


def test_files_that_are_named_exist():
    known = {file.name for file in [*C_FILES, *PAGES]} | FOREIGN

    def missing(path):
        for file in re.findall(r"[\w/-]+\.(?:cuh|cu|md|c|h)\b", INCLUDE.sub("", read(path))):
            if file.split("/")[-1] not in known or (file.startswith("docs/") and not (ROOT / file).is_file()):
                yield file

    named = [*OWN_FILES, *(ROOT / "docs").rglob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "README.md"]
    assert offenders(named, missing) == {}


def test_files_are_short():
    files = [*OWN_FILES, *PYTHON_FILES, *FRAMEWORK_FILES, ROOT / "setup.py"]
    too_long = {}
    for path in files:
        is_kernel = path.suffix == ".cu" and path.is_relative_to(CSRC / "cuda")
        lines = len(read(path).splitlines())
        if lines > (MAX_LINES_OF_A_KERNEL if is_kernel else MAX_LINES):
            too_long[name(path)] = lines
    assert too_long == {}


def test_the_package_imports_no_framework_and_nothing_above_it():
    def refused(path):
        for module in imports(path):
            root = module.split(".")[0]
            if root in FRAMEWORKS or (root.startswith("moqext_") and path.name != "_C.pyi"):
                yield module

    assert offenders(PYTHON_FILES, refused) == {}


def test_one_module_reaches_a_framework_package():
    """`generate` imports the module that its PROVIDER names, when it runs; nothing else does by name."""

    def by_name(path):
        yield from re.findall(r"""["']moqext_\w+\.\w[\w.]*["']""", read(path))

    provider = re.search(r'^PROVIDER = ("moqext_(\w+)\.(\w+)")$', read(ROOT / "moqext/cli/generate.py"), re.M)
    assert offenders(PYTHON_FILES, by_name) == {"moqext/cli/generate.py": [provider[1]]}
    assert (ROOT / "python" / f"moqext_{provider[2]}" / f"{provider[3]}.py").is_file()


def test_reference_is_independent():
    """moqext.reference is what the C code is compared with, so it uses nothing else of moqext."""
    files = [
        path for path in PYTHON_FILES if path.relative_to(ROOT / "moqext").parts[0].startswith("reference")
    ]

    def of_the_rest(path):
        own = [module for module in imports(path) if module.split(".")[0] == "moqext"]
        return [module for module in own if not module.startswith("moqext.reference")]

    assert offenders(files, of_the_rest) == {}


def test_framework_packages_use_public_names():
    """python/ never imports moqext._C, and imports frameworks lazily: not at the top of a package."""
    private = lambda p: [module for module in imports(p) if module.startswith("moqext._C")]  # noqa: E731
    assert offenders(FRAMEWORK_FILES, private) == {}


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


def test_no_mutable_statics():
    """State lives in the module and in its objects, but for the tables that CPython wants to be static."""
    tables = re.compile(r"PyMethodDef|PyModuleDef|PyType_Slot|PyType_Spec|PyMemberDef|PyGetSetDef")

    def variables(path):
        found = [text for text in mutable_statics(read(path)) if not tables.search(text)]
        return {text.split()[-1].lstrip("*") for text in found}

    assert {
        path: set(found)
        for path, found in offenders(OWN_FILES, variables).items()
        if path not in PROCESS_WIDE
    } == STATE_OF_THE_DRIVER
