"""fuse: the same model in fewer kernels, under the same names."""

import copy
import logging
import pickle

import pytest

torch = pytest.importorskip("torch", minversion="2.10")
transformers = pytest.importorskip("transformers", minversion="5.16")
pytest.importorskip("safetensors.torch")

from transformers import AutoModelForCausalLM  # noqa: E402

import moqext_torch  # noqa: E402
import moqext_transformers  # noqa: E402
from moqext_torch import QuantLinear, stepping_aside  # noqa: E402
from moqext_torch.texts import digest  # noqa: E402
from moqext_transformers.fused_linear import FusedLinear, Part  # noqa: E402

from .greedy import GREEDY  # noqa: E402
from .test_transformers import error, export, random_ids, small  # noqa: E402

EVERYTHING = {"norms": 5, "attentions": 2, "mlps": 2, "layers": 2, "routers": 0}
KNOWN = {
    "llama": EVERYTHING,
    "mistral": EVERYTHING,
    "qwen2": EVERYTHING,
    "qwen3": EVERYTHING | {"norms": 9},
    "granite": EVERYTHING | {"layers": 0},  # it scales what it adds
    "phi3": EVERYTHING | {"attentions": 0, "layers": 0},  # q, k and v are one in the file
    "gemma": EVERYTHING | {"norms": 0, "mlps": 0, "layers": 0},  # norms add one to their weights; gelu
    "gemma2": dict.fromkeys(EVERYTHING, 0),
    "phi": dict.fromkeys(EVERYTHING, 0),
}
"""Lists what is fused of two layers and a last norm."""

LLAMA = "checkpoints/llama_"


def configuration(kind):
    if kind != "llama":
        return small(kind)
    sizes = {name: value for name, value in small("mistral").to_dict().items() if name in SIZES}
    return transformers.LlamaConfig(**sizes)


SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "head_dim",
    "pad_token_id",
)


def pair(rng, directory, kind, algo="NVFP4"):
    """A model of random weights, loaded unfused and fused."""
    torch.manual_seed(int(rng.integers(1 << 30)))
    original = AutoModelForCausalLM.from_config(configuration(kind), dtype=torch.bfloat16)
    for name, parameter in original.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 0.0 if name.endswith("bias") else 1.0, 0.1)
    export(directory, original, algo)
    return tuple(moqext_transformers.from_pretrained(directory, fuse=fuse) for fuse in (False, True))


def same_bytes(first, second):
    return first.reshape(-1).view(torch.uint8).equal(second.reshape(-1).view(torch.uint8))


def fused_linears(model):
    return [module for module in model.modules() if isinstance(module, FusedLinear)]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", KNOWN)
@torch.no_grad()
def test_what_is_known_is_fused(rng, tmp_path, kind):
    """In bfloat16 the steps round where they did: the same but for last bits, and the same greedy tokens."""
    plain, fused = pair(rng, tmp_path, kind)
    assert not fused_linears(plain)
    assert moqext_transformers.fuse(copy.deepcopy(plain)) == KNOWN[kind]
    assert moqext_transformers.fuse(fused) == dict.fromkeys(EVERYTHING, 0), "fused twice"
    assert len(fused_linears(fused)) == KNOWN[kind]["attentions"] + (
        0 if kind == "phi3" else KNOWN[kind]["mlps"]
    )
    ids = random_ids(rng, plain, 2, 7)
    layers = fused.config.num_hidden_layers
    # A linear rounds by 2.5e-3 at most where its last sum falls otherwise, four of them a layer and the head.
    assert error(fused(ids).logits, plain(ids).logits) <= 2.5e-3 * (4 * layers + 1)
    assert fused.generate(ids, **GREEDY).shape == (2, 19)


@pytest.mark.parametrize(
    ("kind", "said"),
    {
        "llama": [],
        "granite": ["layers: the forward of GraniteDecoderLayer is none that moqext knows"],
        "gemma": [
            "mlps: the activation is GELUTanh, and moqext's is SiLU",
            "norms: the forward of GemmaRMSNorm is none that moqext knows",
        ],
        "gemma2": [
            "attentions: the forward of Gemma2Attention is none that moqext knows",
            "mlps: the activation is GELUTanh, and moqext's is SiLU",
            "norms: the forward of Gemma2RMSNorm is none that moqext knows",
        ],
    }.items(),
)
def test_the_log_says_once_what_is_not_fused(rng, tmp_path, monkeypatch, caplog, kind, said):
    monkeypatch.setattr(stepping_aside, "_said", set())
    with caplog.at_level(logging.INFO, "moqext_transformers.fusing"):
        pair(rng, tmp_path, kind)
    lines = [line.getMessage() for line in caplog.records if line.name == "moqext_transformers.fusing"]
    assert all(" are not fused (the first is model." in line for line in lines)
    found = sorted(line.partition(" are")[0] + ":" + line.partition("):")[2] for line in lines)
    assert found == said


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@torch.no_grad()
def test_in_float32_nothing_but_calls_is_fused(rng, tmp_path, kind):
    plain, _ = pair(rng, tmp_path, kind, "FP8")
    plain, fused = (
        moqext_transformers.from_pretrained(tmp_path, fuse=fuse, dtype=torch.float32)
        for fuse in (False, True)
    )
    ids = random_ids(rng, plain, 2, 7)
    torch.testing.assert_close(fused(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)
    assert fused.generate(ids, **GREEDY).equal(plain.generate(ids, **GREEDY))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("implementation", ["dynamic", "static"])
@torch.no_grad()
def test_caches_masks_and_attentions(rng, tmp_path, implementation, attention):
    """Padded prompts, so that one token has a mask, through both kinds of caches: as without fusing."""
    pair(rng, tmp_path, "llama")
    plain, fused = (
        moqext_transformers.from_pretrained(
            tmp_path, fuse=fuse, dtype=torch.float32, attn_implementation=attention
        )
        for fuse in (False, True)
    )
    ids = random_ids(rng, plain, 3, 6)
    mask = torch.ones_like(ids)
    mask[0, :3], mask[1, :1] = 0, 0
    options = {**GREEDY, "cache_implementation": implementation, "attention_mask": mask}
    options["disable_compile"] = True
    assert fused.generate(ids, **options).equal(plain.generate(ids, **options))


@torch.no_grad()
def test_compiled_equals_eager(rng, tmp_path):
    _, fused = pair(rng, tmp_path, "llama")
    ids = random_ids(rng, fused, 2, 6)
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    assert compiled(ids, use_cache=False).logits.equal(fused(ids, use_cache=False).logits)


@pytest.mark.parametrize("algo", ["FP8", "NVFP4"])
@torch.no_grad()
def test_states_have_the_names_of_the_checkpoint(rng, tmp_path, algo):
    first, fused = pair(rng, tmp_path / "first", "qwen2", algo)
    state = {name: tensor.clone() for name, tensor in fused.state_dict().items()}
    expected = first.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (state[name].shape, state[name].dtype) == (tensor.shape, tensor.dtype), name
        assert same_bytes(state[name], tensor), name
    second, other = pair(rng, tmp_path / "second", "qwen2", algo)
    ids = random_ids(rng, first, 2, 5)
    graphed = [linear.weight.data_ptr() for linear in fused_linears(fused)]
    fused.load_state_dict(second.state_dict())
    assert fused(ids).logits.equal(other(ids).logits)
    assert [linear.weight.data_ptr() for linear in fused_linears(fused)] == graphed, "in place"
    second.load_state_dict(state)
    assert second(ids).logits.equal(first(ids).logits)


@torch.no_grad()
def test_a_part_is_the_linear_that_stood_there(rng, tmp_path):
    plain, fused = pair(rng, tmp_path, "qwen2")
    before, part = plain.model.layers[1].self_attn.k_proj, fused.model.layers[1].self_attn.k_proj
    assert (type(part), part.in_features, part.out_features) == (Part, 64, 32)
    assert "rows 64 to 95" in repr(part)
    x = torch.from_numpy(rng.standard_normal((3, 64))).to(torch.bfloat16)
    assert error(part(x), before(x)) <= 2.5e-3
    other = plain.model.layers[0].self_attn.k_proj
    part.load_state_dict(other.state_dict())
    assert error(part(x), other(x)) <= 2.5e-3
    values = plain.model.layers[1].self_attn.v_proj
    assert error(fused.model.layers[1].self_attn.v_proj(x), values(x)) <= 2.5e-3


@torch.no_grad()
def test_some_tensors_of_a_part_are_loaded(rng, tmp_path):
    """Through the model, a layer or another module that holds the part; what is not given stays."""
    first, fused = pair(rng, tmp_path / "first", "llama", "FP8")
    second, _ = pair(rng, tmp_path / "second", "llama", "FP8")
    name = "model.layers.0.self_attn.k_proj.weight"
    given = {name: second.state_dict()[name]}
    result = fused.load_state_dict(given, strict=False)
    assert name not in result.missing_keys
    assert "model.layers.0.self_attn.k_proj.weight_scale" in result.missing_keys
    expected = first.state_dict() | given
    assert all(same_bytes(tensor, expected[key]) for key, tensor in fused.state_dict().items())
    part = fused.model.layers[1].mlp.up_proj
    torch.nn.ModuleList([part]).load_state_dict(
        {f"0.{role}": tensor for role, tensor in second.model.layers[1].mlp.up_proj.state_dict().items()}
    )
    x = torch.from_numpy(rng.standard_normal((3, 64))).to(torch.bfloat16)
    assert error(part(x), second.model.layers[1].mlp.up_proj(x)) <= 2.5e-3


def test_codes_of_another_type_are_refused_by_parts(rng, tmp_path):
    """One byte each, and other numbers."""
    _, fused = pair(rng, tmp_path, "llama", "FP8")
    name = "model.layers.0.mlp.up_proj.weight"
    given = {name: fused.state_dict()[name].view(torch.float8_e5m2)}
    with pytest.raises(RuntimeError, match=rf"{name}: expected torch.float8_e4m3fn .* got torch.float8_e5m2"):
        fused.load_state_dict(given, strict=False)


def test_tensors_of_parts_are_not_assigned(rng, tmp_path):
    """The fused linear would not see them."""
    _, fused = pair(rng, tmp_path, "llama")
    with pytest.raises(AttributeError, match="weight: this linear is part of a fused one"):
        fused.model.layers[0].self_attn.q_proj.weight = torch.nn.Parameter(torch.zeros(1))


class _Adapter(torch.nn.Module):
    """A module as adapters put it in the place of a linear."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x):
        return self.base_layer(x) + 1


def _put_another(parent, name):
    setattr(parent, name, _Adapter(getattr(parent, name)))


def _put_another_past_setattr(parent, name):
    parent._modules[name] = _Adapter(getattr(parent, name))


def _hook(parent, name):
    getattr(parent, name).register_forward_hook(lambda module, args, y: y + 1)


def _hook_before(parent, name):
    getattr(parent, name).register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def _patch(parent, name):
    module = getattr(parent, name)
    inner = module.forward
    module.forward = lambda x: inner(x) + 1


@pytest.mark.parametrize("change", [_put_another, _put_another_past_setattr, _hook, _hook_before, _patch])
@pytest.mark.parametrize("place", ["self_attn.v_proj", "mlp.gate_proj", "mlp.act_fn"])
@torch.no_grad()
def test_changes_of_fused_modules_have_an_effect(rng, tmp_path, change, place):
    """Changes act as in the model that was not fused, and no longer once they are gone."""
    plain, fused = pair(rng, tmp_path, "llama")
    ids = random_ids(rng, plain, 2, 5)
    before = fused(ids).logits
    parent, _, name = place.rpartition(".")
    for model in (plain, fused):
        change(model.get_submodule(f"model.layers.1.{parent}"), name)
    layers = fused.config.num_hidden_layers
    assert error(fused(ids).logits, plain(ids).logits) <= 2.5e-3 * (4 * layers + 1)
    assert error(fused(ids).logits, before) > 0.02


@torch.no_grad()
def test_another_second_norm_has_an_effect(rng, tmp_path):
    """The norm is called as the model calls its own, without what is added before it."""
    plain, fused = pair(rng, tmp_path, "llama")
    ids = random_ids(rng, plain, 2, 5)
    for model in (plain, fused):
        model.model.layers[0].post_attention_layernorm = torch.nn.Identity()
    layers = fused.config.num_hidden_layers
    assert error(fused(ids).logits, plain(ids).logits) <= 2.5e-3 * (4 * layers + 1)


@torch.no_grad()
def test_hooks_on_all_modules_hear_parts(rng, tmp_path):
    _, fused = pair(rng, tmp_path, "llama")
    heard = set()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *args: heard.add(module))
    fused(random_ids(rng, fused, 1, 3))
    handle.remove()
    assert heard >= {module for module in fused.modules() if isinstance(module, Part)}


def test_wrong_states_are_refused(rng, tmp_path):
    _, fused = pair(rng, tmp_path, "llama")
    part, state = fused.model.layers[0].mlp.up_proj, fused.state_dict()
    name = "model.layers.0.mlp.up_proj."
    own = {key.removeprefix(name): value for key, value in state.items() if key.startswith(name)}
    with pytest.raises(RuntimeError, match=r"Missing key.*weight_scale_2"):
        part.load_state_dict({key: value for key, value in own.items() if key != "weight_scale_2"})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*something"):
        part.load_state_dict(own | {"something": torch.zeros(1)})
    with pytest.raises(RuntimeError, match=r"weight: expected shape \[96, 32\], got \[96, 31\]"):
        part.load_state_dict(own | {"weight": own["weight"][:, :31]})
    for key, value in fused.state_dict().items():
        assert same_bytes(value, state[key])


def test_saved_models_load_unfused(rng, tmp_path):
    plain, fused = pair(rng, tmp_path / "first", "qwen3")
    fused.save_pretrained(tmp_path / "saved")
    again = moqext_transformers.from_pretrained(tmp_path / "saved", fuse=False)
    ids = random_ids(rng, plain, 2, 5)
    with torch.no_grad():
        assert again(ids).logits.equal(plain(ids).logits)


@torch.no_grad()
def test_copies_pickles_and_moves(rng, tmp_path):
    _, fused = pair(rng, tmp_path, "qwen3", "FP8")
    ids = random_ids(rng, fused, 2, 5)
    expected = fused(ids).logits
    attention = fused.model.layers[0].self_attn
    assert isinstance(attention, transformers.models.qwen3.modeling_qwen3.Qwen3Attention)
    for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert other(ids).logits.equal(expected)
        inside = other.model.layers[0].self_attn
        assert inside.q_proj.fused is inside.fused_qkv
        assert inside.fused_qkv is not attention.fused_qkv
    there = copy.deepcopy(fused).to(torch.float32)
    assert fused_linears(there)[0].dtype == torch.float32
    assert torch.isfinite(there(ids).logits).all()


def test_linears_that_differ_are_left_alone(rng):
    """Layers that differ in format, input scale, bias or dtype stay calls of their own."""

    def linear(scale=1.0, algo="FP8", bias=False, dtype=torch.bfloat16):
        optional = ["input_scale"] if algo == "FP8" else []
        made = QuantLinear(32, 16, algo, bias=bias, dtype=dtype, optional=optional)
        for tensor in (*made.parameters(), *made.buffers()):
            tensor.data.reshape(-1).view(torch.uint8).zero_()
        made.weight_scale.data.fill_(1.0)
        if optional:
            made.input_scale.data.fill_(scale)
        return made

    assert FusedLinear.join([linear(), linear()]) is not None
    for other in (
        linear(0.5),
        linear(algo="FP8_PER_CHANNEL_PER_TOKEN"),
        linear(bias=True),
        linear(dtype=torch.float16),
        torch.nn.Linear(32, 16),
    ):
        assert FusedLinear.join([linear(), other]) is None


def test_gradients_are_refused_or_torchs(rng, tmp_path):
    _, fused = pair(rng, tmp_path, "llama")
    norm = fused.model.norm
    x = torch.from_numpy(rng.standard_normal((2, 64))).to(torch.bfloat16).requires_grad_()
    norm(x).sum().backward()
    assert x.grad is not None
    y, total = norm(x, x)
    (y.sum() + total.sum()).backward()
    with pytest.raises(RuntimeError, match="no gradient"):
        fused(random_ids(rng, fused, 1, 3))


def test_the_text_of_a_function_is_what_counts():
    def one(self, x: int) -> int:
        """With words."""
        y: int = x + 1  # and a comment
        return y

    def two(this, x):
        y = x + 1
        return y

    def three(self, x):
        y = x + 1
        return y

    assert digest(one) == digest(three) != digest(two)
    assert digest(len) == ""


@torch.no_grad()
def test_a_norm_that_adds_one_is_left_alone(rng, tmp_path):
    """A class of the same name with another text."""

    class LlamaRMSNorm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.variance_epsilon = torch.nn.Parameter(torch.zeros(8)), 1e-6

        def forward(self, hidden_states):
            return hidden_states * (1 + self.weight)

    model = torch.nn.Sequential(LlamaRMSNorm())
    assert moqext_transformers.fuse(model) == dict.fromkeys(EVERYTHING, 0)
    assert type(model[0]) is LlamaRMSNorm


@torch.no_grad()
def test_a_hook_hears_the_second_norm(rng, tmp_path):
    _, fused = pair(rng, tmp_path, "llama")
    heard = []
    fused.model.layers[0].post_attention_layernorm.register_forward_hook(lambda *args: heard.append(args))
    result = fused(random_ids(rng, fused, 1, 3), output_hidden_states=True)
    assert len(heard) == 1
    assert len(result.hidden_states) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("algo", ["FP8", "NVFP4"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "phi3"])
@torch.no_grad()
def test_on_a_device(rng, tmp_path, kind, algo):
    """Eager, a CUDA graph of one token over a static cache, and the bytes of the checkpoint."""
    plain, _ = pair(rng, tmp_path, kind, algo)
    expected = plain.state_dict()
    plain, fused = (
        moqext_transformers.from_pretrained(tmp_path, fuse=fuse, device_map="cuda") for fuse in (False, True)
    )
    for name, tensor in fused.state_dict().items():
        assert tensor.is_cuda
        assert same_bytes(tensor.cpu(), expected[name]), name
    ids = random_ids(rng, plain, 2, 7).cuda()
    if algo == "NVFP4":  # codes of activations may flip after a last bit
        limit = 2.5e-3 * (4 * fused.config.num_hidden_layers + 1)
        assert error(fused(ids).logits, plain(ids).logits) <= limit
    options = {**GREEDY, "disable_compile": True}
    dynamic = fused.generate(ids, **options)
    assert dynamic.equal(fused.generate(ids, **options))
    cache = transformers.StaticCache(config=fused.config, max_cache_len=16)
    fused(ids, past_key_values=cache, use_cache=True)
    token, place = ids[:, :1], torch.tensor([[7]], device="cuda")
    mask = (torch.arange(16, device="cuda") <= 7).expand(2, 1, 1, 16)
    step = {"position_ids": place, "past_key_values": cache, "use_cache": True, "attention_mask": mask}

    def again():
        for layer in cache.layers:
            layer.cumulative_length.fill_(7)

    again()
    eager = fused(token, **step).logits
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        again()
        fused(token, **step)
    torch.cuda.current_stream().wait_stream(stream)
    again()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = fused(token, **step).logits
    logits.fill_(float("nan"))
    again()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.isfinite(logits).all()
    assert error(logits, eager) <= (0.0 if algo == "NVFP4" else 0.02)


def test_public_names():
    assert {"rms_norm", "rotary_embedding", "silu_and_mul"} <= set(moqext_torch.__all__)
    assert "fuse" in moqext_transformers.__all__
