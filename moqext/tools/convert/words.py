"""ModelOpt's words for an algorithm in config.json and hf_quant_config.json."""

from moqext.algorithms import ALGORITHMS


def is_raw(quant_algo: str) -> bool:
    """Whether ModelOpt names the algorithm by a constant of its own, and says nothing more of it."""
    facts = ALGORITHMS[quant_algo]
    is_mxfp4 = (facts.codes, facts.second, facts.linear) == ("e2m1", None, "as_is")
    return facts.scales == "blocks" or is_mxfp4


def name_of(quant_algo: str) -> str:
    """The name as ModelOpt spells it."""
    return quant_algo.lower() if is_raw(quant_algo) else quant_algo
