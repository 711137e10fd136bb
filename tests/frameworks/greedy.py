"""Greedy tokens of two models whose logits differ by rounding."""

GREEDY = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def assert_same_tokens(model, plain, ids, limit):
    """Every row of `model.generate` is the row of `plain.generate`, or leaves it where two tokens are level.

    limit is how far logits may be off, a share of their norm. It moves the difference of two logits by
    sqrt(2) of that at most, so only tokens of which `plain` has the logits as close as this may change
    places; what follows them in a row has another text before it and says nothing.
    """
    found = model.generate(ids.to(model.device), **GREEDY).cpu()
    expected = plain.generate(ids, **GREEDY, output_logits=True, return_dict_in_generate=True)
    assert found.shape == expected.sequences.shape
    for row, (tokens, best) in enumerate(zip(found, expected.sequences, strict=True)):
        parted = (tokens != best).nonzero()
        if len(parted):
            at = int(parted[0])
            assert at >= ids.shape[1], "the prompt was changed"
            logits = expected.logits[at - ids.shape[1]][row].float()
            ahead = float((logits[best[at]] - logits[tokens[at]]) / logits.norm())
            assert ahead <= 2**0.5 * limit, f"token {at} of row {row}: {ahead:.1e} of the logits apart"
