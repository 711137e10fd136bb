"""The files of tensors of a new checkpoint, written into a staging folder."""

from collections.abc import Mapping, Sequence
from typing import Any

from moqext.reader.checkpoint_reader import Progress
from moqext.tools.convert.jobs import Job
from moqext.tools.convert.staging import Staging
from moqext.tools.convert.writer import TensorWriter

PYTORCH: Mapping[str, str] = {"format": "pt"}
"""The text entries of the header that exporters of PyTorch models write."""


def write_shards(
    shards: Mapping[str, Sequence[Job]],
    staging: Staging,
    progress: Progress | None,
    metadata: Mapping[str, Mapping[str, str]] | None = None,
) -> dict[str, str]:
    """Writes the jobs of each file, and returns the file of every tensor.

    Args:
        shards: file -> its jobs.
        staging: where to.
        progress: called as progress(bytes written, bytes in all, name of the tensor).
        metadata: file -> text entries of its header; `PYTORCH` where it has none.
    """
    total = sum(job.nbytes for jobs in shards.values() for job in jobs)
    done = 0
    places: dict[str, str] = {}
    for file, jobs in shards.items():
        specs = [spec for job in jobs for spec in job.tensors]
        places.update((spec.name, file) for spec in specs)
        target = staging.folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        with TensorWriter(target, specs, (metadata or {}).get(file, PYTORCH)) as writer:
            for job in jobs:
                for name, values in job.produce():
                    done += writer.append(name, values)
                    if progress is not None:
                        progress(done, total, name)
    return places


def index_of(places: Mapping[str, str], total: int) -> dict[str, Any]:
    """The index of several files: the file of every tensor, and their bytes together."""
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
