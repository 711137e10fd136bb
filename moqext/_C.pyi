"""Types of the native part; use the names of package moqext instead."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, final

import numpy as np
from numpy.typing import NDArray

class ConfigError(ValueError):
    path: str

class UnsupportedQuantization(ValueError): ...

NAME_LIMIT: int
_Info = TypeVar("_Info")

def build_info() -> dict[str, Any]: ...
def cpu_isa() -> str: ...
def num_threads() -> int: ...
def set_num_threads(count: int, /) -> None: ...
def openmp() -> tuple[str | None, str | None]: ...
def cublaslt() -> tuple[str | None, tuple[int, int, int] | None, str | None]: ...
def kernels() -> list[str]: ...
def cuda_devices() -> list[dict[str, Any]]: ...
def cuda_versions() -> tuple[int, int]: ...
def check_variables() -> list[str]: ...
def algorithms() -> list[dict[str, Any]]: ...
def cache_algorithms() -> dict[str, bool]: ...
def names() -> dict[str, Any]: ...
def encode(x: Any, format: str, out: Any = None) -> Any: ...
def decode(codes: Any, format: str, out: Any = None) -> Any: ...
def describe_tensor(x: Any, *, format: str | None = None, out: Any = None) -> dict[str, Any]: ...
def check_tensors(*tensors: Any) -> None: ...
def empty_like(x: Any, shape: Sequence[int], dtype: str, *, format: str | None = None) -> Any: ...
def quantize(
    x: Any,
    scheme: str,
    *,
    scale: Any = None,
    group_size: int | None = None,
    out: Any = None,
    scale_out: Any = None,
    format: str | None = None,
    stream: Any = None,
) -> tuple[Any, ...]: ...
def silu_and_mul_quantize(
    x: Any,
    scheme: str,
    *,
    scale: Any = None,
    out: Any = None,
    scale_out: Any = None,
    format: str | None = None,
    stream: Any = None,
) -> tuple[Any, ...]: ...
def rms_norm_quantize(
    x: Any,
    weight: Any,
    eps: float,
    scheme: str,
    *,
    residual: Any = None,
    scale: Any = None,
    out: Any = None,
    scale_out: Any = None,
    residual_out: Any = None,
    value_out: Any = None,
    format: str | None = None,
    stream: Any = None,
) -> tuple[Any, ...]: ...
def silu_and_mul(x: Any, *, out: Any = None, format: str | None = None, stream: Any = None) -> Any: ...
def rms_norm(
    x: Any,
    weight: Any,
    eps: float,
    *,
    residual: Any = None,
    out: Any = None,
    residual_out: Any = None,
    format: str | None = None,
    stream: Any = None,
) -> Any: ...
def router_logits(x: Any, weight: Any, *, dtype: Any = None, out: Any = None, stream: Any = None) -> Any: ...
def qk_norm_rope(
    x: Any,
    positions: Any,
    table: Any,
    q_heads: int,
    k_heads: int,
    *,
    q_weight: Any = None,
    k_weight: Any = None,
    eps: float = 0.0,
    k_cache: Any = None,
    v_cache: Any = None,
    slots: Any = None,
    stream: Any = None,
) -> Any: ...
def rotary_embedding(x: Any, cos: Any, sin: Any, *, out: Any = None, stream: Any = None) -> Any: ...
def dequantize(
    weight: Any,
    quant_algo: str,
    *,
    weight_scale: Any = None,
    weight_scale_2: Any = None,
    group_size: int | None = None,
    dtype: str | None = None,
    out: Any = None,
) -> Any: ...
def quantize_weight(
    weight: Any,
    quant_algo: str,
    *,
    amax: float | None = None,
    group_size: int | None = None,
    search: str | None = None,
) -> tuple[Any, Any, float | None]: ...
def weight_amax(weight: Any) -> float: ...
def swizzle_block_scales(scale: Any, *, out: Any = None) -> Any: ...
def unswizzle_block_scales(swizzled: Any, shape: Sequence[int], *, out: Any = None) -> Any: ...
def pack_fp4(codes: Any, *, out: Any = None) -> Any: ...
def unpack_fp4(packed: Any, *, out: Any = None) -> Any: ...
def pack_nvfp4(weight: Any, weight_scale: Any, *, out: Any = None) -> Any: ...
def unpack_nvfp4(
    packed: Any,
    shape: Sequence[int],
    group_size: int | None = None,
    *,
    out: Any = None,
    scale_out: Any = None,
) -> tuple[Any, Any]: ...
def route(
    router_logits: Any,
    top_k: int,
    scoring: str,
    *,
    renormalize: bool = False,
    num_groups: int = 1,
    topk_groups: int | None = None,
    correction_bias: Any = None,
    routed_scaling_factor: float = 1.0,
    padding: Any = None,
    out: tuple[Any, Any] | None = None,
    stream: Any = None,
) -> tuple[Any, Any]: ...
def requantize_to_max(
    weight: Any, weight_scale: Any, partitions: Sequence[int], *, out: Any = None
) -> tuple[Any, Any]: ...
def swap_gate_up(stack: Any, *, out: Any = None) -> Any: ...
def expert_input_scale(input_scale: Any, *, out: Any = None) -> Any: ...
def shared_input_scale(input_scale: Any, shape: Sequence[int] | None = None, *, out: Any = None) -> Any: ...
def expert_alphas(
    input_scale: Any, weight_scale_2: Any, *, out: Any = None, scale_out: Any = None
) -> tuple[Any, Any]: ...

@final
class PinnedMemory:
    def __new__(cls, nbytes: int, device: str) -> PinnedMemory: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class OwnedTensor:
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

def to_device(x: Any, device: str) -> OwnedTensor: ...
def to_host(x: Any, *, out: Any = None) -> Any: ...
def copy(x: Any, out: Any, dtype: str) -> Any: ...
def numbers(x: Any, name: str, device: str, limit: int) -> NDArray[np.float32]: ...

class Config:
    def fields(self) -> dict[str, Any]: ...
    def layer_quant(self, module: str, shards: Iterable[str] = ()) -> tuple[str | None, int | None, str]: ...
    def is_excluded(
        self,
        module: str,
        packed_modules_mapping: Mapping[str, Sequence[str]] | None = None,
        semantics: str = "modelopt",
    ) -> bool: ...

def config_parse(documents: Iterable[tuple[str, str, Mapping[str, Any]]]) -> Config: ...
def config_detect(
    mapping: Mapping[str, Any],
) -> Literal["modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"] | None: ...
def glob_match(pattern: str, name: str, fnmatch: bool = False) -> bool: ...
def read_tensor_header(
    text: bytes, info: type[_Info], file: object, data_begin: int, size: int, bits: dict[str, int], /
) -> tuple[dict[str, _Info], dict[str, str]] | None: ...

class Plan:
    @property
    def quant_algo(self) -> str: ...
    @property
    def group_size(self) -> int | None: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    def checkpoint_params(self) -> list[tuple[str, tuple[int, ...], str, str, bool]]: ...
    def prepared_params(self) -> list[tuple[str, tuple[int, ...], str, str, bool]]: ...
    def backend(self, tokens: int, input_scale: bool = True) -> str: ...
    @property
    def memory(self) -> float: ...
    def config(self, tokens: int, input_scale: bool = True) -> tuple[str, int, int, int, float]: ...
    def configs(self, tokens: int, /) -> list[tuple[str, int, int, tuple[float, ...], float]]: ...
    def estimates(self, tokens: int, /) -> list[tuple[str, int, float]]: ...
    def compute_for(self, tokens: int, input_scale: bool = True) -> str: ...
    def explain(self, tokens: int | None = None) -> list[tuple[str, str | None]]: ...
    def notes(self) -> list[tuple[str, str]]: ...
    def measure(
        self, tokens: int, params: Mapping[str, Any], chosen: bool = False
    ) -> list[tuple[str, int, float]]: ...
    def keep(self, tokens: int, kernel: str, variant: int) -> None: ...
    def has_variant(self, tokens: int, kernel: str, variant: int) -> bool: ...
    def bucket(self, tokens: int, /) -> int: ...
    def is_tuned(self, tokens: int, /) -> bool: ...

@final
class LinearPlan(Plan):
    def prepare(
        self, params: Mapping[str, Any], out: Mapping[str, Any] | None = None
    ) -> Mapping[str, Any]: ...
    def run(
        self, x: Any, params: Mapping[str, Any], bias: Any = None, out: Any = None, stream: Any = None
    ) -> Any: ...

def linear_plan(
    quant_algo: str,
    in_features: int,
    out_partitions: Sequence[int],
    group_size: int | None,
    dtype: str,
    device: str,
    compute: str,
    capability: str | None = None,
    fast_accum: bool = False,
    one_input_scale: bool = False,
    quantized_input: bool = False,
    rank: int | None = None,
    batch_invariant: bool = False,
    pretend: bool = False,
) -> LinearPlan: ...

@final
class MoEPlan(Plan):
    def prepare(
        self,
        params: Mapping[str, Any],
        out: Mapping[str, Any] | None = None,
        origins: Mapping[str, Any] | None = None,
    ) -> Mapping[str, Any]: ...
    def run(
        self,
        x: Any,
        params: Mapping[str, Any],
        topk_weights: Any,
        topk_ids: Any,
        expert_map: Any = None,
        apply_router_weight_on_input: bool = False,
        out: Any = None,
        accumulate: bool = False,
        stream: Any = None,
        x_scale: Any = None,
    ) -> Any: ...

def moe_plan(
    quant_algo: str,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    top_k: int,
    activation: str,
    gated: bool,
    group_size: int | None,
    dtype: str,
    device: str,
    compute: str,
    global_num_experts: int | None,
    alpha: float | None,
    beta: float | None,
    limit: float | None,
    interleaved: bool,
    capability: str | None = None,
    quantized_input: bool = False,
    batch_invariant: bool = False,
) -> MoEPlan: ...

@final
class WeightPlan:
    def checkpoint_params(self) -> list[tuple[str, tuple[int, ...], str, str, bool]]: ...
    def prepared_params(self) -> list[tuple[str, tuple[int, ...], str, str, bool]]: ...
    def prepare(
        self, params: Mapping[str, Any], out: Mapping[str, Any] | None = None
    ) -> Mapping[str, Any]: ...

def weight_plan(
    quant_algo: str,
    in_features: int,
    out_partitions: Sequence[int],
    group_size: int | None = None,
    device: str | None = None,
    compute: str | None = None,
    experts: int | None = None,
    one_input_scale: bool = False,
) -> WeightPlan: ...
