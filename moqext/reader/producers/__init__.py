"""Files of other producers than ModelOpt: each is read as if ModelOpt had written it."""
