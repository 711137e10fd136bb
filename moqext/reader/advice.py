"""Advice for each problem of a checkpoint, by the codes of `moqext.reader.problems`.

The documentation and `inspect` show these sentences.
"""

_AGAIN = "Download it again (`hf download ORG/NAME`), or copy it whole from where it came from."
_EXPORT = "Export again from the original model with a current ModelOpt."
_NOTHING = "Nothing."
_REPAIR = "`moqext repair DIR OUT` writes it without."
_BEFORE = "Run `moqext repair` before an engine reads it: "

ADVICE: dict[str, str] = {
    # The files.
    "missing_shard": _AGAIN,
    "unreadable_shard": f"{_AGAIN} A pointer of Git LFS: `git lfs pull`.",
    "missing_tensor": "Download index and file again; `moqext repair` makes an index of what the files hold.",
    "missing_layers": _AGAIN,
    "index_ignored": "Delete the index, or get the files that it names.",
    "no_weights": "Download the weights, or go on: `inspect` and `bench` need none.",
    "unread_files": "Delete them, or name one by `--file` to read it alone.",
    "unread_tensors": "Run `moqext repair`, which indexes the file; else engines miss its tensors.",
    "hole": f"{_NOTHING} {_REPAIR}",
    "duplicate_tensor": f"{_NOTHING} {_REPAIR}",
    "unindexed_tensor": "Run `moqext repair`: engines that follow the index miss the tensor.",
    "unreadable_dtype": f"{_NOTHING} Where an engine needs the tensor, read it by safetensors' own package.",
    "no_quant_config": "Get hf_quant_config.json from the publisher, or let `moqext repair` write it."
    " ComfyUI's files have none.",
    "config_conflict": "Run `moqext repair`, or correct the file that the message says is not followed.",
    "config_note": "Read the message; correct the field where something else is meant.",
    "listed_module_missing": f"{_NOTHING} Look for a half download where the module should be there.",
    "regex_exclusion": "Run `moqext repair`, or write the modules' names into the list.",
    # Configuration against tensors.
    "algo_conflict": _BEFORE + "engines follow the configuration.",
    "group_size_conflict": _BEFORE + "engines follow the configuration.",
    "ambiguous_rule": "Give each part an entry of its own in `quantized_layers`.",
    "excluded_but_quantized": _BEFORE + "it would take codes for weights.",
    "unlisted_but_quantized": _BEFORE + "it would take codes for weights.",
    "stored_unquantized": _BEFORE + "it would look for scales.",
    "mixed_fused_formats": "Load them one by one; for engines that fuse, quantize all alike.",
    "mixed_expert_formats": "Load it by moqext, in parts; for other engines quantize all experts alike.",
    # Tensors that are missing, misshapen or too many.
    "missing_weight": _AGAIN,
    "missing_scale": f"{_AGAIN} Where the source lacks it too: {_EXPORT[0].lower()}{_EXPORT[1:]}",
    "partial_scales": "Run `moqext repair`; where it cannot, export again with ModelOpt 0.46 or later.",
    "missing_expert": _AGAIN,
    "missing_linear": _AGAIN,
    "missing_gate": "Pass `activation=` to `load` where experts have none; else download again.",
    "shape_mismatch": "Compare with the publisher's file; tensors of two models may be mixed.",
    "dtype_mismatch": f"Undo the cast of the tool that made it. {_EXPORT}",
    "unknown_format": "Check with `moqext info` that this version is current; else report the tensors.",
    "unexpected_tensor": "Check which format was meant, and correct `quant_algo`.",
    "conflicting_tensors": "Run `moqext repair`; where it cannot tell which one holds, export again.",
    "repeated_scale": f"{_NOTHING} {_REPAIR}",
    "scales_on_unquantized": "Check that the weight is the intended one; delete the scales.",
    "unowned_tensor": "Check for a misspelled or lost module; delete the tensor where none is meant.",
    "name_too_long": "Rename the tensor.",
    "leftover_tensor": f"{_NOTHING} {_REPAIR}",
    "foreign_scale_name": f"{_NOTHING} For engines: `moqext repair`, or `moqext convert --to modelopt`.",
    "clipped_blocks": "Export again with a producer that computes scales for the blocks it stores.",
    "possibly_clipped_blocks": "Compare with the original (`moqext compare`); export again where up is off.",
    # The order in which scales and codes are stored.
    "swizzled_scales": "Nothing for moqext. Run `moqext repair` for engines, which read the plain order.",
    "exchanged_nibbles": "Nothing for moqext. Run `moqext repair` for engines, which read the plain order.",
    "doubtful_scale_layout": "Say which order it is: `--scale-layout linear` or `swizzled`.",
    "foreign_layout": "Convert it with the tool that wrote it to a format that is read.",
    # Values of scales.
    "scale_not_finite": "Run `moqext repair` (`--nan-blocks zero` for blocks of zeros); else export again.",
    "scale_negative": _EXPORT,
    "scale_zero": "Calibrate again with data that reach the layer.",
    "scale_tiny": "Calibrate again with data that reach the layer.",
    "absurd_input_scale": "Calibrate again; check that the scale is not an amax, or a reciprocal.",
    "lost_scale": _EXPORT,
    "absurd_weight_scale": "Store 1 / scale where it is a reciprocal, or convert the file with its own tool.",
    "all_zero_layer": "Check that the original's layer is zero; `moqext repair` writes codes of zeros.",
    "zero_blocks": _NOTHING,
    "missing_input_scale": "Calibrate where an engine multiplies in 4 or 8 bits; weight-only needs none.",
    "input_scale_partial": "Calibrate again with data that reach every layer.",
    "missing_expert_input_scale": "Calibrate again with more data, so that every expert is reached.",
    "unused_input_scale": _NOTHING,
    "uncalibrated_input_scale": "Calibrate again with more data, so that the layer is reached.",
    "large_input_scale": "Nothing, or look for an outlier in the calibration's data.",
    "unequal_weight_scale_2": "Nothing for moqext. For engines that take one scale, export with them equal.",
    "unequal_input_scale": "Nothing for moqext. For engines that take one scale, export with them equal.",
    # The KV cache.
    "kv_scale_missing": "Export again with the cache calibrated; engines take 1.0 in its place.",
    "kv_scales_partial": "Export again with the cache calibrated; engines take 1.0 in their place.",
    "kv_scales_absent": "Nothing, or calibrate the cache where 1.0 costs accuracy.",
    "kv_scales_unannounced": "Set `kv_cache_quant_algo` where the cache is to be quantized.",
    "kv_scales_one": "Nothing, or calibrate the cache where 1.0 costs accuracy.",
    "old_kv_scale_name": "Nothing for moqext. For engines: `moqext repair` writes the present names.",
    "kv_scales_per_head": "Use an engine that takes one a head, or calibrate one for all heads.",
    "kv_bias": "Use an engine that adds them, or export without an affine cache.",
    "kv_scale_in_vision": _NOTHING,
}
"""A sentence or two for each code, in the order of the table of codes."""
