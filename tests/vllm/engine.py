"""Tasks of the engine for the tests, in a process of its own: `engine.py TASK ARGUMENT...`.

Nothing of the plug-in is imported before vLLM has found it. Models are float32 on the CPU and bfloat16 on a
GPU, where vLLM's attention wants 16 bits.
"""

import json
import sys
from functools import partial

import torch

ON_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if ON_CUDA else "cpu"
DTYPE = "bfloat16" if ON_CUDA else "float32"
PROMPTS = [[1, 5, 9, 13], [3, 30, 21, 11, 2, 8, 40], [7]]
NEW = 16
MEMORY = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 28} if ON_CUDA else {}
SIZES = {"max_num_seqs": 8, "max_num_batched_tokens": 256}
GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4],
    },
}
PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
PARTS["fused_qkv_a_proj"] = ("q_a_proj", "kv_a_proj_with_mqa")


def say(value):
    print("RESULT", json.dumps(value), flush=True)


def make_engine(directory, **options):
    from vllm import LLM

    return LLM(
        directory,
        skip_tokenizer_init=True,
        **{"enforce_eager": True, "max_model_len": 48, "dtype": DTYPE, **MEMORY, **SIZES} | options,
    )


def generate(llm, **options):
    """The greedy tokens of every prompt."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    how = SamplingParams(detokenize=False, temperature=0, ignore_eos=True, max_tokens=NEW)
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, how, use_tqdm=False, **options)]


def without_cache(directory):
    """The configuration without a format of the cache: Transformers keeps the dtype of the model."""
    from pathlib import Path

    config = json.loads(Path(directory, "config.json").read_text()).get("quantization_config")
    if config is None:
        return {}
    return {"quantization_config": {key: value for key, value in config.items() if "kv_cache" not in key}}


# ---------------------------------------------------------------------------------------------------- tasks


def tokens(*directories, **options):
    """The tokens of checkpoints, and which methods their layers have."""
    for directory in directories:
        llm = make_engine(directory, hf_overrides=without_cache(directory), **options)
        say([generate(llm), llm.apply_model(methods)[0]])
        del llm


def handed_over(directory):
    """The tokens, how many linears take codes, and how often they got some."""
    from moqext_vllm import quantized_input
    from moqext_vllm.linear import MoqextModelOptLinearMethod

    quantized_input.FEW_TOKENS = 0
    counts = []
    apply = MoqextModelOptLinearMethod.apply

    def count(self, layer, x, bias=None):
        counts.append(not isinstance(x, torch.Tensor))
        return apply(self, layer, x, bias)

    MoqextModelOptLinearMethod.apply = count
    llm = make_engine(directory, hf_overrides=without_cache(directory))
    found = generate(llm)
    say([found, llm.apply_model(takers)[0], sum(counts), len(counts)])


def codes_of_norms(directory):
    """The tokens, how often a linear read codes that lay beside values, and how often one ran."""
    from moqext_vllm import quantized_input

    quantized_input.FEW_TOKENS = 0
    counts = []
    read = quantized_input.read

    def count(x, layer, takes_codes):
        found = read(x, layer, takes_codes)
        counts.append(isinstance(x, torch.Tensor) and found[1] is not None)
        return found

    quantized_input.read = count
    llm = make_engine(directory, hf_overrides=without_cache(directory))
    say([generate(llm), sum(counts), len(counts)])


def heads(directory, how):
    """The tokens, how many attentions were taken over, and how often `qk_norm_rope` ran and stored.

    In graphs of the device, or "compiled". On the CPU it never does: what stands in its place then is vLLM's
    own, by the forward of the plug-in, or in a compiled graph steps, of which the embedding counts.
    """
    from moqext import ops as functions

    calls = []
    for name in ("qk_norm_rope", "rotary_embedding"):
        function = getattr(functions, name)
        setattr(functions, name, partial(noted, calls, function))
    options = {"enforce_eager": False} if how == "compiled" else GRAPHS if ON_CUDA else {}
    llm = make_engine(directory, hf_overrides=without_cache(directory), **options)
    found = generate(llm), llm.apply_model(taken_over)[0]
    say([*found, len(calls), sum("slots" in options for options in calls)])


def noted(calls, function, *args, **options):
    calls.append(options)
    return function(*args, **options)


def taken_over(model):
    return sum(bool(getattr(module, "moqext_turns", False)) for module in model.modules())


def gates(directory):
    """The tokens, the classes of the routers' linears, and how often moqext ran one."""
    from moqext import ops as functions

    counts = {"router_logits": 0}
    functions.router_logits = counted(functions.router_logits, counts, "router_logits")
    llm = make_engine(directory, hf_overrides=without_cache(directory), **(GRAPHS if ON_CUDA else {}))
    say([generate(llm), llm.apply_model(gate_classes)[0], counts["router_logits"]])


def gate_classes(model):
    names = {type(module).__name__ for module in model.modules()}
    return sorted(name for name in names if name.endswith("GateLinear"))


def compiled_pairs(directory):
    """The tokens of a compiled model, how many norms were joined with linears, and how often they ran.

    A number of rows for each call; those of making the engine count, too.
    """
    from moqext import ops as functions
    from moqext_torch import norm_linear

    rows, counts, joined = [], {"join": 0}, norm_linear.join_norms
    quantize = functions.rms_norm_quantize

    def count(graph):
        found = joined(graph)
        counts["join"] += found
        return found

    def run(x, *args, **kwargs):
        rows.append(x.shape[0])
        return quantize(x, *args, **kwargs)

    norm_linear.join_norms = count
    functions.rms_norm_quantize = run
    llm = make_engine(directory, hf_overrides=without_cache(directory), enforce_eager=False)
    say([generate(llm), counts["join"], rows])


def takers(model):
    """How many linears offer to take codes."""
    return sum(getattr(module, "_input_quant_key", None) is not None for module in model.modules())


def plain(directory, how):
    """The tokens alone: in "eager" mode, or "compiled" by torch."""
    llm = make_engine(directory, hf_overrides=without_cache(directory), enforce_eager=how == "eager")
    say(generate(llm))


def methods(model):
    """The classes of the methods of moqext in a model, with the number of layers that have them."""
    counts = {}
    for module in model.modules():
        name = type(getattr(module, "quant_method", None)).__name__
        if name.startswith("Moqext"):
            counts[name] = counts.get(name, 0) + 1
    return counts


def reference(*directories):
    """The tokens of Transformers, and of each step the two best and how far apart they are, in last places.

    These are of bfloat16 numbers of the size of the best logit.
    """
    from transformers import AutoModelForCausalLM

    import moqext_transformers  # noqa: F401

    for directory in directories:
        say(generated(AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, DTYPE))))


def generated(model):
    """The tokens of a model of Transformers, and how sure it is of each."""
    model = model.to(DEVICE).eval()
    found, bests = [], []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device=DEVICE)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        found.append(out.sequences[0, len(prompt) :].tolist())
        best, order = torch.cat(out.logits).float().topk(2)
        apart = (best[:, 0] - best[:, 1]) / 2.0 ** (best[:, 0].abs().log2().floor() - 7)
        bests.append(list(zip(order.tolist(), apart.tolist(), strict=True)))
    return found, bests


def adapted(directory, adapter):
    """The tokens without an adapter, those with it, and which methods layers have."""
    from vllm.lora.request import LoRARequest

    llm = make_engine(
        directory, hf_overrides=without_cache(directory), enable_lora=True, max_lora_rank=8, max_loras=1
    )
    with_it = generate(llm, lora_request=LoRARequest("adapter", 1, adapter))
    say([generate(llm), with_it, llm.apply_model(methods)[0]])


def batches(*directories):
    """For each directory the tokens of each prompt by itself, and those of prompts in one batch.

    Tokens are as of `generate_two`, with their logarithms to the bit.
    """
    for directory in directories:
        llm = make_engine(directory, hf_overrides=without_cache(directory), **(GRAPHS if ON_CUDA else {}))
        alone = [generate_two(llm, [prompt])[0] for prompt in PROMPTS]
        say([alone, generate_two(llm), llm.apply_model(invariant)[0]])
        del llm


def invariant(model):
    """How many layers of moqext there are, and how many of these are batch invariant."""
    own = [getattr(module, "quant_method", None) for module in model.modules()]
    own = [method for method in own if type(method).__name__.startswith("MoqextModelOpt")]
    return [len(own), sum(method.batch_invariant for method in own)]


def merged(directory, adapter):
    """The tokens of Transformers, as `reference`, of dequantized weights with an adapter merged in."""
    from pathlib import Path

    from safetensors.torch import load_file

    import moqext_transformers
    from moqext_torch import QuantLinear

    model = moqext_transformers.from_pretrained(directory, fuse=False, dtype=getattr(torch, DTYPE))
    pairs = load_file(Path(adapter, "adapter_model.safetensors"))
    about = json.loads(Path(adapter, "adapter_config.json").read_text())
    for name, layer in list(model.named_modules()):
        if isinstance(layer, QuantLinear):
            weight = layer.dequantize(torch.float32)
            a, b = (pairs.get(f"base_model.model.{name}.lora_{part}.weight") for part in "AB")
            if a is not None:
                weight = weight + b @ a * (about["lora_alpha"] / about["r"])
            plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=False, dtype=layer.dtype)
            plain.weight = torch.nn.Parameter(weight.to(layer.dtype))
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, plain)
    say(generated(model))


def layers(*directories):
    """The quantized layers of checkpoints, and which of them do not give moqext's own bits."""
    for directory in directories:
        llm = make_engine(directory, hf_overrides=without_cache(directory))
        say(llm.apply_model(partial(compare_layers, directory))[0])
        del llm


def is_linear(method):
    """Whether a method is moqext's of linears."""
    return type(method).__name__ in ("MoqextModelOptLinearMethod", "MoqextCompressedTensorsLinearMethod")


def compare_layers(directory, model):
    import moqext

    checked, wrong = [], []
    rng = torch.Generator(DEVICE).manual_seed(7)
    dtype = getattr(torch, DTYPE)
    with moqext.Checkpoint(directory) as checkpoint:
        for name, module in model.named_modules():
            method = getattr(module, "quant_method", None)
            kind = type(method).__name__
            if is_linear(method):
                parent, _, own = name.rpartition(".")
                parts = [f"{parent}.{part}".strip(".") for part in PARTS.get(own, (own,))]
                layer = checkpoint.load(parts, dtype=DTYPE, device=DEVICE)
                x = torch.randn(5, layer.in_features, generator=rng, dtype=dtype, device=DEVICE)
                expected = layer(x)
                found = method.apply(module, x, getattr(module, "bias", None))[:, : expected.shape[1]]
            elif kind == "MoqextModelOptMoEMethod":
                layer = checkpoint.load(name.removesuffix(".routed_experts"), dtype=DTYPE, device=DEVICE)
                x = torch.randn(5, method.method.hidden_size, generator=rng, dtype=dtype, device=DEVICE)
                count, top_k = method.method.num_experts, method.method.top_k
                ids = torch.rand(5, count, generator=rng, device=DEVICE).argsort()[:, :top_k].int()
                weights = torch.rand(5, top_k, generator=rng, device=DEVICE)
                expected = layer(x, weights, ids)
                found = method.apply(module, x, weights, ids, None, None)
            else:
                continue
            checked.append(name)
            if not torch.equal(found, expected):
                wrong.append(name)
    return [checked, wrong]


def reload(*pairs):
    """Reports what reloads do, for pairs of directories of equal shapes, "one,other": tokens by load.

    Last comes whether all parameters are the same objects at the same places as at first.
    """
    for pair in pairs:
        directory, other = pair.split(",")
        llm = make_engine(directory)
        places = llm.apply_model(addresses)[0]
        found = {"first": generate(llm)}
        llm.collective_rpc("reload_weights")
        found["again"] = generate(llm)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": other})
        found["other"] = generate(llm)
        llm.collective_rpc(update, args=(directory,))
        found["back"] = generate(llm)
        in_place = places == llm.apply_model(addresses)[0]
        del llm
        llm = make_engine(other)
        found["other alone"] = generate(llm)
        try:
            llm.collective_rpc(update, args=(directory, "layers.0.self_attn.k_proj.weight"))
        except Exception as error:
            found["lacking"] = [type(error).__name__, str(error)]
        say([found, in_place])
        del llm


def update(worker, directory, but="nothing"):
    """Hands the weights of a directory to the model, as a trainer would."""
    from pathlib import Path

    from safetensors.torch import load_file

    tensors = load_file(Path(directory, "model.safetensors"))
    given = ((name, tensor) for name, tensor in tensors.items() if not name.endswith(but))
    worker.model_runner.reload_weights(weights_iterator=given)


def addresses(model):
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: [id(tensor), tensor.data_ptr()] for name, tensor in tensors}


def sleep(*directories):
    """Tokens before sleep and after each level of it, and whether all parameters are where they were.

    After the second level weights are loaded anew. vLLM on the CPU does not sleep: there the memory of
    parameters is overwritten, and that of buffers kept, as level 2 has it.
    """
    for directory in directories:
        options = {"enable_sleep_mode": True, **GRAPHS} if ON_CUDA else {}
        llm = make_engine(directory, **options)
        places = llm.apply_model(addresses)[0]
        found = {"first": generate(llm)}
        if ON_CUDA:
            for level in (1, 2):
                llm.sleep(level=level)
                llm.wake_up(tags=["weights"])
                if level == 2:
                    llm.collective_rpc("reload_weights")
                llm.wake_up(tags=["kv_cache"])
                found[f"level {level}"] = generate(llm)
        else:
            llm.apply_model(forget)
            llm.collective_rpc("reload_weights")
            found["level 2"] = generate(llm)
        say([found, places == llm.apply_model(addresses)[0]])
        del llm


def forget(model):
    """Overwrites all parameters with ones in every bit."""
    for param in model.parameters():
        if param.numel():
            param.data.view(-1).view(torch.uint8).fill_(0xFF)


def made_up(*directories):
    """How many values of the logits of a prompt are finite, of how many, and the methods of layers.

    Of engines that load nothing; directories hold config.json alone.
    """
    for directory in directories:
        llm = make_engine(directory, load_format="dummy")
        say([generate(llm), llm.apply_model(methods)[0], llm.apply_model(outputs)[0]])
        del llm


def random(*directories):
    """The tokens of the benchmark's mixture of experts, whose weights come from no file, and its methods."""
    from benchmarks import vllm_random

    vllm_random.register()
    for directory in directories:
        llm = make_engine(directory, load_format=vllm_random.LOAD_FORMAT)
        say([generate(llm), llm.apply_model(methods)[0]])
        del llm


def outputs(model):
    """Tells of each quantized linear whether its output is finite, and not zero."""
    found = {}
    for name, module in model.named_modules():
        if is_linear(getattr(module, "quant_method", None)):
            columns = module.quant_method.in_features
            x = torch.linspace(-1, 1, 3 * columns, device=DEVICE).reshape(3, columns)
            y = module.quant_method.apply(module, x.to(getattr(torch, DTYPE)))
            found[name] = bool(y.isfinite().all()) and bool((y != 0).any())
    return found


def routed(directory, how):
    """The tokens, how often moqext routed, and which methods route themselves; "compiled" or "eager"."""
    from moqext_vllm import routing

    calls = []
    route = routing.route
    routing.route = lambda *args, **options: calls.append(1) or route(*args, **options)
    llm = make_engine(directory, hf_overrides=without_cache(directory), enforce_eager=how == "eager")
    say([generate(llm), len(calls), llm.apply_model(routers)[0]])


def routers(model):
    """Tells of each layer of experts whether its method routes."""
    found = {name: getattr(module, "quant_method", None) for name, module in model.named_modules()}
    return {
        name: method.is_monolithic
        for name, method in found.items()
        if type(method).__name__ == "MoqextModelOptMoEMethod"
    }


def weights(*directories):
    """The largest relative error of the weights that layers hand out, before they are prepared and after."""
    from unittest import mock

    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from moqext_vllm.experts import MoqextModelOptMoEMethod
    from moqext_vllm.linear import MoqextModelOptLinearMethod

    prepare_linear = MoqextModelOptLinearMethod.process_weights_after_loading
    prepare_experts = MoqextModelOptMoEMethod.process_weights_after_loading
    for directory in directories:
        held = {}

        def linear(method, layer, held=held):
            found = {"stored": method.dequantize_weight(layer)}
            prepare_linear(method, layer)
            columns = method.in_features
            found["product"] = method.apply(layer, torch.eye(columns, device=layer.weight.device)).T
            found["prepared"] = method.dequantize_weight(layer)
            held[method.prefix] = found

        def experts(method, layer, held=held):
            w13, w2 = method.dequantize_weight(layer)
            held[method.prefix.removesuffix(".routed_experts")] = {"w13": w13, "w2": w2}
            prepare_experts(method, layer)

        with (
            mock.patch.object(MoqextModelOptLinearMethod, "process_weights_after_loading", linear),
            mock.patch.object(MoqextModelOptMoEMethod, "process_weights_after_loading", experts),
        ):
            llm = make_engine(directory, hf_overrides=without_cache(directory))
        say({name: worst(directory, name, found) for name, found in held.items()})
        del llm


def worst(directory, name, found):
    """The largest relative error of a layer's weights, by where they are from."""
    import moqext

    with moqext.Checkpoint(directory) as checkpoint:
        if "w13" in found:
            parts = [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")]["mixtral" in str(directory)]
            each = [
                [torch.tensor(checkpoint.dequantize(f"{name}.{expert}.{part}")) for part in parts]
                for expert in range(len(found["w2"]))
            ]
            expected = {
                "w13": torch.stack([torch.cat([gate, up]) for gate, up, _ in each]),
                "w2": torch.stack([down for _, _, down in each]),
            }
        else:
            parent, _, own = name.rpartition(".")
            parts = [f"{parent}.{part}".strip(".") for part in PARTS.get(own, (own,))]
            weight = torch.cat([effective(checkpoint, part) for part in parts])
            expected = dict.fromkeys(found, weight)
    errors = {}
    for key, value in found.items():
        rows = expected[key].shape[-2]
        value = value.cpu()[..., :rows, :]  # a head's rows are padded
        error = (value - expected[key]).abs() / expected[key].abs().clamp_min(1e-30)
        errors[key] = float(error.max())
    return errors


def effective(checkpoint, name):
    """The weight of a linear, with the factors of its input in it."""
    from moqext_torch.exchange import stored_tensor

    weight, factor = torch.tensor(checkpoint.dequantize(name)), f"{name}.pre_quant_scale"
    return weight * stored_tensor(checkpoint, factor) if factor in checkpoint.tensors else weight


def tokens_split(directory, options):
    """The tokens of a checkpoint that the engine's own workers share."""
    llm = make_engine(directory, hf_overrides=without_cache(directory), **json.loads(options))
    say(generate(llm))


def split(*cases):
    """The tokens of checkpoints whose layers are split, or what is raised: this process is one rank of two.

    Weights are reloaded then, and give the same tokens. A case is a JSON list of a directory and options of
    the engine.
    """
    import gc
    import os
    from itertools import count

    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    number = count()
    rank = int(os.environ["RANK"])

    def meeting(executor):
        return f"file://{os.environ['MEETING']}{next(number)}", rank, rank

    ExecutorWithExternalLauncher._distributed_args = meeting
    if not ON_CUDA:
        complete_communicator()
    for case in cases:
        directory, options = json.loads(case)
        try:
            llm = make_engine(
                directory,
                hf_overrides=without_cache(directory),
                distributed_executor_backend="external_launcher",
                **{"tensor_parallel_size": 2} | options,
            )
            tokens = generate(llm)
            llm.collective_rpc("reload_weights")
            again = generate(llm)
            say(tokens if again == tokens else ["tokens of reloaded weights", again])
            del llm
        except Exception as error:
            say([type(error).__name__, str(error)])
        gc.collect()


def complete_communicator():
    """Gives vLLM's communicator of CPUs the exchanges of ranks with prompts of their own, which it lacks."""
    import torch.distributed as dist
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def all_gatherv(self, given, dim=0, sizes=None):
        if isinstance(given, list):
            return [all_gatherv(self, each, dim, sizes) for each in given]
        sizes = sizes or [len(given)] * self.world_size
        padded = given.new_zeros(max(sizes), *given.shape[1:])
        padded[: len(given)] = given
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self.device_group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def reduce_scatterv(self, given, dim=-1, sizes=None):
        total = given.clone()
        dist.all_reduce(total, group=self.device_group)
        return total.split(sizes)[self.rank_in_group].clone()

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv


def cache_scales(directory):
    """The scales of each attention's cache in a model of bfloat16, and once more after a reload."""
    llm = make_engine(directory, dtype="bfloat16")
    found = llm.apply_model(read_cache_scales)[0]
    llm.collective_rpc("reload_weights")
    say([found, llm.apply_model(read_cache_scales)[0]])


def read_cache_scales(model):
    return {
        name: [module._k_scale_float, module._v_scale_float]
        for name, module in model.named_modules()
        if hasattr(module, "_k_scale_float")
    }


def parameters(*directories):
    """The parameters of models that were built and loaded, before anything is prepared, or what was raised.

    By name: the classes, from the parameter's own to torch's, its shape, dtype and a hash of its bytes, after
    "marked" where moqext sees that nothing was ever written to one.
    vLLM's own methods choose no kernels, which not every machine has. Where this vLLM is files of Python
    alone, it takes the machine for a CPU.
    """
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    if not vllm.platforms.current_platform.device_type:
        vllm.platforms._current_platform = CpuPlatform()
    import os
    import tempfile

    from vllm.distributed import init_distributed_environment

    choose_no_kernels()
    meeting = tempfile.mkdtemp()
    init_distributed_environment(1, 0, f"file://{meeting}/{os.getpid()}", 0, "gloo")
    for directory in directories:
        try:
            model = load_model(directory)
            say({name: describe(param) for name, param in model.named_parameters()})
        except Exception as error:
            say([type(error).__name__, str(error)])


def load_model(directory):
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import destroy_model_parallel, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    how = {"dtype": "bfloat16", "max_model_len": 48, "enforce_eager": True, "skip_tokenizer_init": True}
    config = EngineArgs(directory, **how).create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        destroy_model_parallel()  # whether there are groups of experts depends on the model
        initialize_model_parallel()
        model = initialize_model(vllm_config=config)
        get_model_loader(config.load_config).load_weights(model, config.model_config)
    return model


def choose_no_kernels():
    from types import SimpleNamespace

    from vllm.model_executor.layers.quantization import modelopt

    experts = SimpleNamespace(is_monolithic=lambda: False)
    modelopt.select_linear_kernel = lambda *args, **options: None
    modelopt.expose_input_quant_key = lambda *args: None
    modelopt.select_fp8_moe_backend = lambda *args, **options: (None, experts)
    modelopt.select_nvfp4_moe_backend = lambda *args, **options: (None, experts)
    modelopt.is_global_sf_supported_for_nvfp4_backend = lambda backend: False


def describe(param):
    from hashlib import sha256

    classes = [cls.__name__ for cls in type(param).__mro__]
    data = param.data.contiguous().reshape(-1).view(torch.uint8).numpy()
    value = sha256(data).hexdigest()
    if hasattr(param, "weight_loader") and "moqext_vllm.parameters" in sys.modules:
        from moqext_vllm.parameters import is_marked

        value = f"marked {value}" if is_marked(param.data) else value
    return [classes[: classes.index("Parameter") + 1], list(param.shape), str(param.dtype), value]


def error(directory):
    """Tells what loading a damaged checkpoint raises; what is left of the engine makes a second one fail."""
    try:
        make_engine(directory)
    except Exception as found:
        say([type(found).__name__, str(found)])
    else:
        say(None)


def classes(*names):
    """Which classes vLLM has for names of methods, once its plug-ins are loaded, twice."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    import vllm.plugins

    vllm.plugins.plugins_loaded = False
    load_general_plugins()
    from vllm.model_executor.layers.quantization import get_quantization_config

    say({name: get_quantization_config(name).__module__.split(".")[0] for name in names})


def ops(directory, how, options="{}"):
    """The tokens, the layers that moqext runs, calls of `moqext.ops`, and the key of what is compiled.

    Calls are those of generating. On a GPU those of making the engine count, too: what was captured then is
    replayed later. Tokens are [the one, its logarithm, the second best, its logarithm].
    """
    from moqext import ops as functions

    counts = dict.fromkeys(("rms_norm", "silu_and_mul"), 0)
    for name in counts:
        setattr(functions, name, counted(getattr(functions, name), counts, name))
    settings = {"enforce_eager": how == "eager"} | json.loads(options)
    llm = make_engine(directory, **{"hf_overrides": without_cache(directory)} | settings)
    if not ON_CUDA:
        counts.update(dict.fromkeys(counts, 0))
    key = llm.llm_engine.vllm_config.compute_hash()
    say([generate_two(llm), llm.apply_model(replaced)[0], counts, key])


def two_best(directory):
    """The tokens as `generate_two` has them."""
    say(generate_two(make_engine(directory, hf_overrides=without_cache(directory))))


def generate_two(llm, prompts=PROMPTS):
    """The greedy tokens of every prompt, each with the best one beside it: of equals either may be chosen."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
    how = SamplingParams(detokenize=False, temperature=0, ignore_eos=True, max_tokens=NEW, logprobs=2)
    found = []
    for out in llm.generate(prompts, how, use_tqdm=False):
        answer, steps = out.outputs[0], []
        for chosen, step in zip(answer.token_ids, answer.logprobs, strict=True):
            other = min((token for token in step if token != chosen), key=lambda token: step[token].rank)
            steps.append([value for token in (chosen, other) for value in (token, step[token].logprob)])
        found.append(steps)
    return found


def counted(function, counts, name):
    def call(*args, **kwargs):
        counts[name] += 1
        return function(*args, **kwargs)

    return call


def between(model):
    """The layers that moqext runs, each by its name."""
    names = ("MoqextRMSNorm", "MoqextSiluAndMul")
    return {name: module for name, module in model.named_modules() if type(module).__name__ in names}


def replaced(model):
    """How many layers of each of moqext's classes there are."""
    kinds = [type(module).__name__ for module in between(model).values()]
    return {kind: kinds.count(kind) for kind in kinds}


def values(directory, options="{}"):
    """How far layers by moqext are from vLLM's own, in last places of the model's dtype."""
    llm = make_engine(directory, hf_overrides=without_cache(directory), **json.loads(options))
    say(llm.apply_model(compare_between)[0])


def compare_between(model):
    import torch

    apart = {}
    for name, module in between(model).items():
        parameter = next(model.parameters())
        dtype, device = parameter.dtype, parameter.device
        for rows in (1, 3, 64):
            x = torch.randn(rows, getattr(module, "hidden_size", 512), dtype=dtype, device=device)
            for args in [(x,), (x, x.flip(0) * 3)] if hasattr(module, "weight") else [(x,)]:
                pairs = [
                    call(*(each.clone() for each in args))
                    for call in (module.vllm_forward, module.moqext_forward)
                ]
                first, second = (pair if isinstance(pair, tuple) else (pair,) for pair in pairs)
                places = [last_places(one, two) for one, two in zip(first, second, strict=True)]
                apart.setdefault(name, []).append(max(places))
    return apart


def last_places(one, two):
    """The largest distance of two tensors in last places of numbers of their size, or of 2^-6 at least."""
    import torch

    size = torch.maximum(one.abs(), two.abs()).double().clamp(min=2.0**-6)
    step = 2.0 ** torch.floor(torch.log2(size)) * torch.finfo(one.dtype).eps
    return float(((one.double() - two.double()).abs() / step).max())


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
