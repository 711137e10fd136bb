"""Problems of a checkpoint that could be opened: the record, and the table of stable codes.

A code has one severity and one meaning, and keeps both; what differs from case to case is the message. The
documentation and the tests read this table.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Severity = Literal["error", "warning", "note"]

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""Worst first."""

Repair = Literal["yes", "if", "no"]
"""Whether `moqext repair` ends a finding: always, where the files tell how, or never."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding.

    Attributes:
        code: stable identifier, a key of `CODES`.
        severity: "error" (running would be wrong), "warning" (damaged or contradictory, may be wrong) or
            "note".
        layer: the module it concerns, None when it is not about one.
        tensor: the tensor it concerns, None when it is not about one.
        message: what was found and what it means, for people.
    """

    code: str
    severity: Severity
    layer: str | None
    tensor: str | None
    message: str


class Code(NamedTuple):
    """One row of the table of codes."""

    severity: Severity
    meaning: str
    repair: Repair = "no"


CODES: dict[str, Code] = {
    # The files.
    "missing_shard": Code("error", "A file that the index, or the number of another one, promises is gone."),
    "unreadable_shard": Code("error", "A file that the index names cannot be read, or is damaged."),
    "missing_tensor": Code("error", "The index places a tensor in a file that does not hold it.", "if"),
    "missing_layers": Code("error", "config.json counts more layers than there are tensors of."),
    "index_ignored": Code("warning", "An index beside a single file; the index is not read.", "yes"),
    "no_weights": Code("note", "The directory has no safetensors files."),
    "unread_files": Code("note", "Safetensors files that are no part of the checkpoint; they are not read."),
    "unread_tensors": Code(
        "warning", "A safetensors file with tensors that no file which is read has; they are lost.", "if"
    ),
    "hole": Code("note", "Bytes of a file that no tensor covers.", "yes"),
    "duplicate_tensor": Code("note", "A tensor is in several files; the one the index names counts.", "yes"),
    "unindexed_tensor": Code("note", "A tensor is in a file, but not in the index.", "yes"),
    "unreadable_dtype": Code("note", "A tensor of a data type that cannot be handed out."),
    "no_quant_config": Code(
        "warning", "Quantized tensors, and no configuration that says how they are meant.", "if"
    ),
    "config_conflict": Code("warning", "The two configuration files of the checkpoint disagree.", "if"),
    "config_note": Code("note", "How a field of the configuration was understood."),
    "listed_module_missing": Code("note", "`quantized_layers` names a module that no tensor belongs to."),
    "regex_exclusion": Code(
        "warning", "An exclusion is a regular expression of another producer; here it matches nothing.", "yes"
    ),
    # Configuration against tensors. The stored tensors decide.
    "algo_conflict": Code(
        "warning", "The tensors are not those of the configured algorithm, but of another one.", "if"
    ),
    "group_size_conflict": Code(
        "warning", "The stored scales have another group size than the configuration says.", "if"
    ),
    "ambiguous_rule": Code("warning", "The parts that a fused name stands for are configured differently."),
    "excluded_but_quantized": Code(
        "warning", "The configuration excludes the layer, but it is stored quantized.", "if"
    ),
    "unlisted_but_quantized": Code(
        "note", "No rule of the configuration covers the layer; it is stored quantized.", "if"
    ),
    "stored_unquantized": Code(
        "note", "The configuration quantizes the layer, but it is stored unquantized.", "if"
    ),
    "mixed_fused_formats": Code(
        "warning", "Projections that engines fuse have different formats: they load one by one, never fused."
    ),
    "mixed_expert_formats": Code("warning", "Experts of one group have different formats."),
    # Tensors that are missing, misshapen or too many.
    "missing_weight": Code("error", "Scales of a layer without its weight."),
    "missing_scale": Code("error", "A scale without which the weight means nothing is not in the file."),
    "partial_scales": Code("error", "Block scales are fewer than the format has: the others are lost.", "if"),
    "missing_expert": Code("error", "An expert, or one of its projections, is not in the file."),
    "missing_linear": Code(
        "error", "A linear that the layers or linears beside it call for is not in the file."
    ),
    "missing_gate": Code(
        "warning", "Experts without a gate, where config.json or other layers say that there was one."
    ),
    "shape_mismatch": Code("error", "Shapes of a layer's tensors do not fit each other, or the format."),
    "dtype_mismatch": Code("error", "A tensor has a data type that its role does not allow."),
    "unknown_format": Code("error", "A quantized weight in no format that is known."),
    "unexpected_tensor": Code("error", "A tensor that changes the result, in a format that has none such."),
    "conflicting_tensors": Code(
        "error", "A tensor of a layer is stored twice, under two names, and the two differ.", "if"
    ),
    "repeated_scale": Code("note", "A scale is stored twice, under two names, with one value.", "yes"),
    "scales_on_unquantized": Code(
        "warning", "Scales beside a weight that is stored unquantized; they are ignored."
    ),
    "unowned_tensor": Code("warning", "A scale or quantized tensor that belongs to no layer."),
    "name_too_long": Code("error", "A tensor name of more than 4095 bytes; it belongs to no layer."),
    "leftover_tensor": Code(
        "note", "A tensor of the quantizer's inner state that the export left behind; ignored.", "if"
    ),
    "foreign_scale_name": Code(
        "note", "The weight scale is stored under another producer's name; it multiplies too.", "if"
    ),
    "clipped_blocks": Code(
        "error", "128x128 block scales that the producer computed for other blocks: the codes are damaged."
    ),
    "possibly_clipped_blocks": Code(
        "warning", "128x128 block scales that some exporters computed for other blocks: perhaps damaged."
    ),
    # The order in which scales and codes are stored.
    "swizzled_scales": Code(
        "note", "Block scales are stored in the 128 x 4 order of cuBLAS; they are read right.", "if"
    ),
    "exchanged_nibbles": Code(
        "note", "The even column is in the high half of a byte, as ComfyUI stores it; it is read right.", "if"
    ),
    "doubtful_scale_layout": Code(
        "error", "Block scales whose values look stored in another order than the file says, or leaves open."
    ),
    "foreign_layout": Code("error", "The file says that a layer is stored in a form that is not read here."),
    # Values of scales.
    "scale_not_finite": Code("error", "A scale is NaN or infinite.", "if"),
    "scale_negative": Code("error", "A scale is negative."),
    "scale_zero": Code("error", "An activation or cache scale is zero: quantizing would divide by it."),
    "scale_tiny": Code(
        "error", "An activation or cache scale is 2^-128 or less: float32 does not hold its reciprocal."
    ),
    "absurd_input_scale": Code(
        "error", "An activation scale is so large that activations would be quantized to zero."
    ),
    "lost_scale": Code(
        "error", "A weight's scale is zero over codes that are neither zero nor NaN: the scale is lost."
    ),
    "absurd_weight_scale": Code(
        "error",
        "A weight's scale is so large that no model has such weights: perhaps its reciprocal is meant.",
    ),
    "all_zero_layer": Code(
        "note", "The weight's scale is zero, and so is every code, or it is NaN: a layer of zeros.", "yes"
    ),
    "zero_blocks": Code("note", "Some block or row scales are zero: those weights are zero."),
    "missing_input_scale": Code(
        "note", "No activation scale: not calibrated, or meant for unquantized activations."
    ),
    "input_scale_partial": Code("warning", "A layer lacks the activation scale that layers like it have."),
    "missing_expert_input_scale": Code("warning", "Some experts lack the activation scale that others have."),
    "unused_input_scale": Code(
        "note", "An activation scale in a format that does not use one; it is ignored."
    ),
    "uncalibrated_input_scale": Code(
        "note", "The activation scale is a value that marks a missing calibration."
    ),
    "large_input_scale": Code(
        "note", "The activation scale is unusually large, which leaves headroom; legitimate."
    ),
    "unequal_weight_scale_2": Code(
        "note", "Projections that engines fuse have unequal second-level scales; each keeps its own here."
    ),
    "unequal_input_scale": Code(
        "note", "Projections that engines fuse have unequal activation scales; each keeps its own here."
    ),
    # The KV cache.
    "kv_scale_missing": Code("warning", "An attention has one of the k and v scales, but not the other."),
    "kv_scales_partial": Code(
        "warning", "Some attention modules lack the cache scales that their like have."
    ),
    "kv_scales_absent": Code("note", "A quantized KV cache is announced without any scale: 1.0 applies."),
    "kv_scales_unannounced": Code(
        "note", "Cache scales are stored, but the configuration names no KV algorithm."
    ),
    "kv_scales_one": Code(
        "note", "Every cache scale is exactly 1.0: clamped by the producer, or not calibrated."
    ),
    "old_kv_scale_name": Code(
        "note", "A cache scale has a name of earlier exporters or other tools; it is read.", "yes"
    ),
    "kv_scales_per_head": Code(
        "note", "Cache scales of each head: weights do not need them, and engines have one for all heads."
    ),
    "kv_bias": Code("note", "Affine cache biases are stored: the cache is quantized around them."),
    "kv_scale_in_vision": Code(
        "note", "Cache scales in a vision tower, which has no cache; they are ignored."
    ),
}


def make_problem(code: str, message: str, *, layer: str | None = None, tensor: str | None = None) -> Problem:
    """The record of a finding, with the severity that `CODES` gives its code."""
    return Problem(code, CODES[code].severity, layer, tensor, message)


def worst_severity(problems: list[Problem] | tuple[Problem, ...]) -> Severity | None:
    """The worst severity among the problems, None when there is none."""
    found = {problem.severity for problem in problems}
    return next((severity for severity in SEVERITIES if severity in found), None)
