"""The entry point: registers moqext's configurations over those that vLLM has for ModelOpt."""

import logging
import os
from importlib import import_module

logger = logging.getLogger("vllm.moqext")  # below vLLM's own, so that its settings hold

NEEDED = {  # what has to be there, by module
    "vllm.model_executor.layers.quantization": ("register_quantization_config",),
    "vllm.model_executor.layers.quantization.modelopt": (
        "ModelOptFp8Config",
        "ModelOptMixedPrecisionConfig",
        "ModelOptMxFp8Config",
        "ModelOptNvFp4Config",
        "ModelOptQuantConfigBase",
    ),
    "vllm.model_executor.layers.quantization.kv_cache": ("BaseKVCacheMethod",),
    "vllm.model_executor.layers.linear": (
        "LinearBase",
        "LinearMethodBase",
        "UnquantizedLinearMethod",
        "WEIGHT_LOADER_V2_SUPPORTED",
    ),
    "vllm.model_executor.layers.vocab_parallel_embedding": ("ParallelLMHead",),
    "vllm.model_executor.layers.fused_moe": ("FusedMoEMethodBase", "RoutedExperts"),
    "vllm.model_executor.layers.attention": ("Attention", "MLAAttention"),
    "vllm.model_executor.parameter": (
        "BlockQuantScaleParameter",
        "ChannelQuantScaleParameter",
        "ModelWeightParameter",
        "PerTensorScaleParameter",
        "RowvLLMParameter",
    ),
    "vllm.model_executor.layers.layernorm": ("RMSNorm",),
    "vllm.model_executor.layers.rotary_embedding.base": ("RotaryEmbedding",),
    "vllm.model_executor.utils": ("replace_parameter",),
    "vllm.config": ("get_current_vllm_config_or_none",),
    "vllm.envs": ("VLLM_BATCH_INVARIANT",),
    "vllm.forward_context": ("get_forward_context", "is_forward_context_available"),
    "vllm.platforms": ("current_platform",),
}
NEEDED_BY_LAYERS = {  # what moqext's kernels in vLLM's own layers need besides
    "vllm.model_executor.custom_op": ("CustomOp", "op_registry_oot"),
    "vllm.model_executor.layers.activation": ("SiluAndMul",),
}
NEEDED_BY_COMPRESSED_TENSORS = {
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors": (
        "CompressedTensorsConfig",
    ),
}
NEEDED_BY_GATE = {
    "vllm.model_executor.custom_op": ("PluggableLayer", "op_registry_oot"),
    "vllm.model_executor.layers.fused_moe.router.gate_linear": ("GateLinear",),
}


def find_missing(needed: dict[str, tuple[str, ...]] = NEEDED) -> list[str]:
    """The dotted names that the plug-in uses and this vLLM does not have."""
    missing = []
    for module, names in needed.items():
        try:
            found = import_module(module)
        except ImportError:
            missing.append(module)
            continue
        missing += [f"{module}.{name}" for name in names if not hasattr(found, name)]
    return missing


def register() -> None:
    """Puts moqext in the place of vLLM's "modelopt", "modelopt_fp4", "modelopt_mxfp8" and "modelopt_mixed".

    With MOQEXT_VLLM_COMPRESSED_TENSORS=1 in that of "compressed-tensors" as well.
    Norms and activations between their linears run by moqext, too, see `moqext_vllm.activations`. vLLM calls
    it in each of its processes, and may do so again. With MOQEXT_VLLM=0, or where this vLLM lacks what the
    plug-in needs, vLLM is left as it is.
    """
    if os.environ.get("MOQEXT_VLLM") == "0":
        return
    missing = find_missing()
    if missing:
        logger.warning("moqext leaves this vLLM alone: it has no %s", ", ".join(missing))
        return
    from vllm.model_executor.layers.quantization import register_quantization_config

    from moqext_vllm.config import CONFIGS
    from moqext_vllm.settings import read_compressed_tensors

    for config in CONFIGS:
        register_quantization_config(config.NAME)(config)
    if read_compressed_tensors():
        _register_compressed_tensors()
    missing = find_missing(NEEDED_BY_LAYERS)
    if missing:
        logger.warning("moqext leaves norms and activations to this vLLM: it has no %s", ", ".join(missing))
        return
    from moqext_vllm.activations import register_layers

    register_layers()
    missing = find_missing(NEEDED_BY_GATE)
    if missing:
        logger.info("moqext leaves linears of routers to this vLLM: it has no %s", ", ".join(missing))
    else:
        from moqext_vllm.gate import register_gate

        register_gate()


def _register_compressed_tensors() -> None:
    missing = find_missing(NEEDED_BY_COMPRESSED_TENSORS)
    if missing:
        logger.warning("moqext leaves compressed-tensors to this vLLM: it has no %s", ", ".join(missing))
        return
    from vllm.model_executor.layers.quantization import register_quantization_config

    from moqext_vllm.compressed_tensors import MoqextCompressedTensorsConfig

    register_quantization_config(MoqextCompressedTensorsConfig.NAME)(MoqextCompressedTensorsConfig)
