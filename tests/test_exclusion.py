"""Exclusion: the producer's semantics by cases and against a plain model, vLLM's against a transcription."""

import fnmatch
import json
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moqext import ConfigError, QuantConfig

from .work import assert_growth, assert_linear, each

PACKED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "gate": ["gate_a"],
}


def config(*exclude, **fields):
    return QuantConfig.from_dict(
        {"quantization": {"quant_algo": "FP8", "exclude_modules": list(exclude), **fields}}
    )


# ------------------------------------------------------------------------------- the producer's semantics


@each(
    "entry, module, excluded",
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "lm_head2", False),
        ("lm_head", "model.lm_head", True),
        ("lm_head", "language_model.lm_head", True),
        ("language_model.lm_head", "lm_head", True),
        ("model.layers.1*", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1*", "model.layers.10.mlp.up_proj", True),
        ("model.layers.1.*", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1.*", "model.layers.10.mlp.up_proj", False),
        ("model.layers.1.*", "model.layers.1", True),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.10.mlp.up_proj", False),
        ("model.layers.1", "model.layers.11", False),
        ("model.layers.1", "model.layers", False),
        ("vision_tower", "vision_tower.encoder.layers.0.fc1", True),
        ("vision_tower", "model.vision_tower.encoder.layers.0.fc1", True),
        ("vision_tower", "model.vision_tower2", False),
        ("mtp*", "mtp.layers.0.mlp.up_proj", True),
        ("mtp.*", "mtp.layers.0.mlp.up_proj", True),
        ("*.mlp.gate*", "model.layers.3.mlp.gate", True),
        ("*.mlp.gate*", "model.layers.3.mlp.gate_proj", True),  # what the pattern says
        ("model.layers.3.mlp.gate", "model.layers.3.mlp.gate_proj", False),
        ("model.layers.3.mlp.gate", "model.layers.3.mlp.gate_up_proj", False),
        ("*.attn.*", "layers.0.attn.wq_a", True),
        ("*.attn.*", "layers.0.attn", True),
        ("*.attn.*", "layers.0.attn_norm", False),
        ("head", "head", True),
        ("head", "lm_head", False),
        ("model.layers.0.self_attn*", "language_model.model.layers.0.self_attn.q_proj", True),
        ("model.language_model.layers.0.self_attn*", "model.layers.0.self_attn.q_proj", True),
        ("model.layers.0.mlp*", "model.language_model.layers.0.mlp.up_proj", True),
        ("layers.0.mlp*", "model.layers.0.mlp.up_proj", True),
        ("model.*", "model.layers.0.mlp.up_proj", True),
        ("model.*", "lm_head", False),  # the prefix alone says nothing about what stands outside it
        ("language_model*", "language_model.model.layers.0.mlp.up_proj", True),
        ("model.layers.?.mlp.up_proj", "model.layers.1.mlp.up_proj", False),  # only * is special
        ("model.layers.[0].mlp.up_proj", "model.layers.0.mlp.up_proj", False),
        ("", "anything", False),
        ("*", "anything", True),
        ("model.layers.0.mlp.experts*", "model.layers.0.mlp.experts", True),
        ("model.layers.0.mlp.experts*", "model.layers.0.mlp.experts.3.up_proj", True),
        ("model.layers.0.mlp.experts.*", "model.layers.0.mlp.experts", True),
    ],
)
def test_entries_as_the_producer_means_them(entry, module, excluded):
    assert config(entry).is_excluded(module) is excluded
    assert config("unrelated*", "*.unrelated", entry).is_excluded(module) is excluded


def plain_model(entries, name):
    """The documented rule, without tables or hashes."""

    def body(text):
        return re.sub(
            r"^(model\.language_model\.|language_model\.model\.|language_model\.|model\.)", "", text
        )

    def fits(entry, name):
        if "*" not in entry:
            return name == entry or name.startswith(entry + ".")
        pattern = ".*".join(map(re.escape, entry.split("*")))
        return any(
            re.fullmatch(pattern, text, re.DOTALL)
            for text in [name] + [name + "."] * bool(re.search(r"\.\*+$", entry))
        )

    return any(
        fits(entry, name) or (body(entry)[:1] not in ("", "*") and fits(body(entry), body(name)))
        for entry in entries
    )


COMPONENTS = st.sampled_from(
    ["model", "language_model", "layers", "0", "1", "10", "mlp", "experts", "gate", "a", "lm_head", ""]
)
MODULES = st.lists(COMPONENTS, min_size=1, max_size=6).map(".".join).filter(bool)
ENTRIES = st.lists(
    st.one_of(COMPONENTS, st.sampled_from(["*", "1*", "*a", "g*e", ".", "?", "[0-1]"])), max_size=6
).map(".".join)
LOOSE_ENTRIES = st.text(alphabet="model.ag10*?[-]é", max_size=12)


@given(st.lists(st.one_of(ENTRIES, LOOSE_ENTRIES), max_size=6), MODULES)
@example(["model."], "model.")
@example(["a.*", "a"], "a")
@example(["a.**"], "a")
@example(["model."], ".model")
@settings(max_examples=250)
def test_producer_semantics_equal_the_plain_model(entries, module):
    if module.rpartition(".")[2] == "experts":
        module += ".0"  # a container may be refused instead
    assert config(*entries).is_excluded(module) is plain_model(entries, module)


def test_fused_names_ask_for_their_parts():
    stem = "model.layers.0.self_attn."
    qkv = config(stem + "q_proj", stem + "k_proj", stem + "v_proj")
    assert qkv.is_excluded(stem + "qkv_proj")
    assert not qkv.is_excluded(stem + "o_proj")
    assert not qkv.is_excluded("model.layers.1.self_attn.qkv_proj")
    assert config(stem + "qkv_proj").is_excluded(stem + "qkv_proj")
    assert config(stem + "q_proj*", stem + "k_*", stem + "v_proj").is_excluded(stem + "qkv_proj")
    mla = config(stem + "q_a_proj", stem + "kv_a_proj_with_mqa")
    assert mla.is_excluded(stem + "fused_qkv_a_proj_with_mqa")
    assert mla.is_excluded(stem + "own", packed_modules_mapping={"own": ["q_a_proj", "kv_a_proj_with_mqa"]})
    # A mapping that knows the name replaces the built-in parts, and leaves the other names alone.
    assert qkv.is_excluded(stem + "qkv_proj", packed_modules_mapping={"gate_up_proj": ["a", "b"]})
    assert not qkv.is_excluded(stem + "qkv_proj", packed_modules_mapping={"qkv_proj": ["o_proj"]})


@pytest.mark.parametrize("listed, other", [("q_proj", "k_proj"), ("k_proj", "q_proj"), ("v_proj", "q_proj")])
def test_partly_excluded_fused_names_are_refused(listed, other):
    stem = "model.layers.0.self_attn."
    with pytest.raises(ConfigError, match=f"{listed} is excluded and {other} is not") as caught:
        config(stem + listed).is_excluded(stem + "qkv_proj")
    assert caught.value.path == "$.quantization.exclude_modules"
    with pytest.raises(ConfigError, match=r"q_proj: .*k_proj: .*v_proj: "):
        config(stem + listed).layer_quant(stem + "qkv_proj")


def test_expert_containers_agree_or_are_refused():
    stem = "model.layers.0.mlp.experts"
    names = [f"{stem}.{e}.{p}" for e in range(3) for p in ("gate_proj", "up_proj", "down_proj")]
    listed = config(*names)
    with pytest.raises(ConfigError, match="shards="):
        listed.is_excluded(stem)  # how many experts there are is not known here
    with pytest.raises(ConfigError, match="shards="):
        listed.layer_quant("language_model." + stem)
    assert listed.layer_quant(stem, names).quant_algo is None
    with pytest.raises(ConfigError, match=re.escape(f"{stem}.3.up_proj: FP8")):
        listed.layer_quant(stem, [*names, f"{stem}.3.up_proj"])
    assert listed.is_excluded(stem, {"experts": names})
    assert not listed.is_excluded("model.layers.1.mlp.experts")


def test_sentinels_are_cut_and_wildcards_kept():
    mark = "\0backbone.pt_name_sentinel"
    read = config(
        f"lm_head.{mark}", f"backbone.layers.0.{mark}*", f"backbone.layers.1.{mark}.*", "backbone.norm"
    )
    assert read.exclude_modules == ("lm_head", "backbone.layers.0*", "backbone.layers.1.*", "backbone.norm")
    assert read.is_excluded("lm_head")
    assert read.is_excluded("backbone.layers.0.mixer.in_proj")
    assert not read.is_excluded("backbone.layers.10.mixer.in_proj")


# -------------------------------------------------------------------------------------- vLLM's semantics


class PartlyPackedError(Exception):
    pass


def vllm_model(entries, name, packed):
    """Answers as vLLM does, step by step, with Python's own fnmatch."""

    def listed():
        last = name.split(".")[-1]
        if last in packed:
            if name in entries:
                return True
            answers = {name.replace(last, shard) in entries for shard in packed[last]}
            if len(answers) > 1:
                raise PartlyPackedError
            return answers.pop()
        if "experts" in name:
            return any(name in entry for entry in entries if "experts" in entry)
        return name in entries

    if entries:
        if listed():
            return True
        for entry in entries:
            if entry != name and (entry in name or entry in name.removeprefix("language_model.")):
                return True
        if any(fnmatch.fnmatchcase(name, entry) for entry in entries):
            return True
    return any(tower in name for tower in ("vision_tower", "vision_model", "vit_large_projector"))


def check_vllm(entries, name, packed):
    read = config(*entries)
    try:
        expected = vllm_model(list(read.exclude_modules), name, packed)
    except PartlyPackedError:
        with pytest.raises(ConfigError, match="only one of the shards"):
            read.is_excluded(name, packed, semantics="vllm")
    else:
        assert read.is_excluded(name, packed, semantics="vllm") is expected


VLLM_WORDS = """model language_model vision_tower vision_model layers 0 1 10 mlp experts shared_experts
gate gate_a lm_head self_attn q_proj k_proj v_proj qkv_proj gate_proj up_proj gate_up_proj"""
VLLM_COMPONENTS = st.sampled_from(VLLM_WORDS.split())
VLLM_NAMES = st.lists(VLLM_COMPONENTS, min_size=1, max_size=6).map(".".join)
VLLM_ENTRIES = st.one_of(
    VLLM_NAMES,
    st.lists(
        st.one_of(VLLM_COMPONENTS, st.sampled_from(["*", "1*", "?", "[01]", "[!0]", "*proj", ""])), max_size=6
    ).map(".".join),
    st.text(alphabet="model.xprts*[]!?-é", max_size=8),
)


@given(st.lists(VLLM_ENTRIES, max_size=6), VLLM_NAMES, st.sampled_from([PACKED, {}]))
@example(["model.layers.1"], "model.layers.10.mlp.up_proj", {})
@example(["mlp.gate"], "model.layers.0.mlp.gate_up_proj", PACKED)
@example(["lm_head"], "lm_head", {})
@example([""], "lm_head", {})
@example(["q_proj.q_proj", "k_proj.k_proj", "v_proj.v_proj"], "qkv_proj.qkv_proj", PACKED)
@example(["layers.0.experts.1.w1"], "layers.0.experts", {})
@example(["x.language_model.y"], "language_model.y", {})
@settings(max_examples=250)
def test_vllm_semantics_equal_its_rules(entries, name, packed):
    check_vllm(entries, name, packed)


@given(st.data())
@settings(max_examples=200)
def test_vllm_semantics_on_names_made_from_the_entries(data):
    entries = data.draw(st.lists(VLLM_ENTRIES.filter(bool), min_size=1, max_size=6))
    entry = data.draw(st.sampled_from(entries))
    name = data.draw(
        st.sampled_from([entry, entry + ".q_proj", "language_model." + entry, entry[:-1], "x" + entry])
    )
    name = name.replace("*", data.draw(st.sampled_from(["", "0", "qkv_proj"]))).replace("?", "1")
    if name:
        check_vllm(entries, name, PACKED)


def test_vllm_semantics_on_the_genuine_lists(data):
    paths = sorted((data / "configs").glob("*.json"))
    assert paths
    for path in paths:
        read = QuantConfig.from_dict(json.loads(path.read_text()))
        entries = list(read.exclude_modules)
        stems = [
            "lm_head",
            "model.layers.1",
            "model.layers.10",
            "language_model.model.layers.3",
            "mtp.layers.0",
        ]
        leaves = [
            "self_attn.qkv_proj",
            "self_attn.o_proj",
            "mlp.gate",
            "mlp.gate_up_proj",
            "mlp.experts",
            "mlp.shared_experts.down_proj",
        ]
        names = entries + stems + [f"{stem}.{leaf}" for stem in stems for leaf in leaves]
        for name in names:
            try:
                expected = vllm_model(entries, name, PACKED)
            except PartlyPackedError:
                expected = None
            try:
                assert read.is_excluded(name, PACKED, semantics="vllm") is expected, (path.name, name)
            except ConfigError:
                assert expected is None, (path.name, name)


@each(
    "entries, module, producer, vllm",
    [
        (["model.layers.1*"], "model.layers.10.mlp.up_proj", True, True),
        (["model.layers.1.*"], "model.layers.10.mlp.up_proj", False, False),
        (["model.layers.1"], "model.layers.1.mlp.up_proj", True, True),
        (["model.layers.1"], "model.layers.10.mlp.up_proj", False, True),
        (["mlp.gate"], "model.layers.0.mlp.gate_up_proj", False, True),
        (["lm_head"], "model.lm_head_norm", False, True),
        (["p.*"], "p", True, False),
        (["x.?"], "x.1", False, True),
        (["model.layers.0.mlp"], "layers.0.mlp", True, False),
        (["layers.0.mlp"], "model.layers.0.mlp", True, True),
        (["x.q_proj*", "x.k_proj*", "x.v_proj*"], "x.qkv_proj", True, False),
        (["lm_head"], "model.vision_tower.blocks.0.fc1", False, True),
        ([], "vision_model.encoder.layers.0.mlp.fc1", False, True),
        ([], "visual.blocks.0.mlp.fc1", False, False),
    ],
)
def test_the_two_semantics_differ_as_documented(entries, module, producer, vllm):
    read = config(*entries)
    assert read.is_excluded(module, PACKED) is producer
    assert read.is_excluded(module, PACKED, semantics="vllm") is vllm


def test_one_listed_expert_and_its_container():
    read = config("model.layers.0.mlp.experts.1.up_proj")
    assert read.is_excluded("model.layers.0.mlp.experts", semantics="vllm")
    with pytest.raises(ConfigError, match="shards="):
        read.is_excluded("model.layers.0.mlp.experts")


def test_the_empty_entry_lists_a_shard_without_text():
    with pytest.raises(ConfigError, match="only one of the shards"):
        config("", "other").is_excluded("qkv", {"qkv": ["", "q"]}, semantics="vllm")
    check_vllm(["", "other"], "qkv", {"qkv": ["", "q"]})
    check_vllm([""], "qkv", {"qkv": [""]})


def test_trailing_wildcards_are_split():
    read = config("lm_head", "a.b*", "a.c.*", "*", "d*e", group_size=None, kv_cache_quant_algo="FP8")
    split = read.expand_trailing_wildcards()
    assert split.exclude_modules == ("lm_head", "a.b", "a.b.*", "a.c.*", "*", "d*e")
    assert (split.quant_algo, split.kv_cache_quant_algo) == ("FP8", "FP8")
    assert read.exclude_modules[1] == "a.b*"
    packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    lost = config("x.q_proj*", "x.k_proj*", "x.v_proj*")
    assert not lost.is_excluded("x.qkv_proj", packed, semantics="vllm")
    assert lost.expand_trailing_wildcards().is_excluded("x.qkv_proj", packed, semantics="vllm")


@pytest.mark.parametrize("semantics", ["modelopt", "vllm"])
@pytest.mark.parametrize("everything", ["*", "**", "***"])
def test_a_star_alone_still_excludes_everything_when_it_is_expanded(everything, semantics):
    """A lone star became "" and ".*", which exclude nothing."""
    split = config(everything).expand_trailing_wildcards()
    for module in ("lm_head", "model.layers.0.mlp.up_proj", "x.qkv_proj"):
        assert split.is_excluded(module, PACKED, semantics=semantics)
        assert split.layer_algo(module) is None


def split_of_vllm(entries):
    """The pairs, by the rule of the engine: two characters at least, a star that no dot precedes."""
    for entry in entries:
        if len(entry) > 1 and entry[-1] == "*" and entry[-2] != ".":
            yield from (entry[:-1], entry[:-1] + ".*")
        else:
            yield entry


@given(st.lists(st.one_of(ENTRIES, LOOSE_ENTRIES), min_size=1, max_size=4), MODULES)
@example(["*"], "lm_head")
@example(["a.**"], "a")
@example(["layers.1*"], "layers.10")
@example(["model.*"], ".model")
@example(["model."], ".model")
@settings(max_examples=250)
def test_expanding_wildcards_keeps_modules_and_their_subtrees(entries, module):
    """A module that an entry without its star fits stays excluded, with all below it, and no other is."""
    if module.rpartition(".")[2] == "experts":
        module += ".0"  # a container may be refused instead
    read = config(*entries)
    split = read.expand_trailing_wildcards()
    assert split.exclude_modules == tuple(dict.fromkeys(split_of_vllm(read.exclude_modules)))
    named = [entry[:-1] for entry in read.exclude_modules if entry not in split.exclude_modules]  # were split
    below = [f"{entry}.*" for entry in named]
    for name in (module, f"{module}.0"):
        if plain_model(named, name) or plain_model(below, name):
            assert split.is_excluded(name)
        if split.is_excluded(name):
            assert read.is_excluded(name)
        assert split.is_excluded(name) is plain_model(split.exclude_modules, name)


# ---------------------------------------------------------------------------------- arguments and limits


def test_arguments_are_checked():
    read = config("lm_head")
    with pytest.raises(ValueError, match="'modelopt' or 'vllm', got 'sglang'"):
        read.is_excluded("lm_head", semantics="sglang")
    with pytest.raises(TypeError, match="module"):
        read.is_excluded(b"lm_head")
    with pytest.raises(TypeError, match="packed_modules_mapping"):
        read.is_excluded("a.qkv_proj", {"qkv_proj": "q_proj"})
    with pytest.raises(TypeError, match="shards"):
        read.layer_quant("a.qkv_proj", shards="q_proj")
    for semantics in ("modelopt", "vllm"):
        for name in ("", "a" * 5000):
            with pytest.raises(ValueError, match="1 to 4095 bytes"):
                read.is_excluded(name, semantics=semantics)
    assert not read.is_excluded("a" * 4095)


def benchmark_case(rng, names, patterns):
    """Names of a 60-layer model of 330 experts, and patterns as an exporter writes them for one."""
    modules = [
        f"model.layers.{layer}.mlp.experts.{expert}.{projection}"
        for layer in range(60)
        for expert in range(334)
        for projection in ("gate_proj", "up_proj", "down_proj")
    ][:names]
    entries = ["lm_head", "mtp*", "*.visual.*"]
    entries += [f"model.layers.{layer}.self_attn*" for layer in range(60)]
    entries += [f"model.layers.{layer}.mlp.gate" for layer in range(60)]
    while len(entries) < patterns:
        entries.append(f"model.layers.{rng.integers(60)}.mlp.experts.{rng.integers(334)}.*")
    return modules, entries


@pytest.mark.parametrize("leading", ["", "*"])
@pytest.mark.parametrize("semantics", ["modelopt", "vllm"])
def test_a_name_does_not_pay_for_each_pattern(rng, semantics, leading):
    """Against every pattern one by one, 16 times the patterns would be 16 times the work."""

    def count(patterns):
        modules, entries = benchmark_case(rng, 4000, patterns)
        read = config(*(leading + entry for entry in entries))
        return lambda: sum(read.is_excluded(module, semantics=semantics) for module in modules)

    assert 3 <= count(500)() <= 3 * 377
    assert_growth(count, 150, 2400, 4)


def test_many_entries_are_read_in_linear_time():
    entries = [f"model.layers.{i}.mlp.up_proj" for i in range(32_000)]
    read = config(*entries)
    assert read.is_excluded("model.layers.31999.mlp.up_proj")
    assert not read.is_excluded("model.layers.32000.mlp.up_proj")
    assert_linear(lambda size: lambda: config(*entries[:size]), 2000)


@pytest.mark.parametrize("semantics", ["modelopt", "vllm"])
@pytest.mark.parametrize("entry", ["*a*a*a*a*{}", "*{}", "[a-c]?{}*", "experts.{}"])
def test_many_entries_of_one_hostile_kind_are_linear(entry, semantics):
    """Entries are read once, and a name is held against each once; entries are not compared with entries."""

    def ask(size):
        entries = [entry.format(i) for i in range(size)]

        def work():
            read = config(*entries)
            assert not read.is_excluded("model.layers.3.mlp.experts_x", semantics=semantics)
            last = "a" * 40 + str(size - 1)
            assert read.is_excluded(last, semantics=semantics) is entry.startswith("*")

        return work

    assert_linear(ask, 1000)


def test_hostile_patterns_are_linear():
    read = config(*("*a" * i + "*b" * 5 + "*" for i in range(1, 200)))

    def ask(size):
        name = "ab" * 2 + "a" * size + "x"
        return lambda: [read.is_excluded(name, semantics=semantics) for semantics in ("modelopt", "vllm")]

    assert ask(2000)() == [False, False]
    assert_linear(ask, 200)
