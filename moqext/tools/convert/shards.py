"""The files of tensors of a new checkpoint: their names, the tensors of each, and the index of several."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from moqext.reader.checkpoint_reader import Progress
from moqext.tools.convert.jobs import Job
from moqext.tools.convert.staging import Staging
from moqext.tools.convert.writer import TensorWriter

PYTORCH: Mapping[str, str] = {"format": "pt"}
"""The text entries of the header that exporters of PyTorch models write."""


class Written(NamedTuple):
    """Result of `write_shards`.

    Attributes:
        places: the file of every tensor.
        left_out: bytes that the staging had already.
    """

    places: dict[str, str]
    left_out: int


class Named(NamedTuple):
    """Files of tensors.

    Attributes:
        shards: file -> the jobs that write it.
        index_file: the name of their index; None of a single file.
    """

    shards: dict[str, Sequence[Job]]
    index_file: str | None


def name_shards(shards: Sequence[Sequence[Job]], config: Mapping[str, Any]) -> Named:
    """The jobs by the file that they write, named as Transformers has them, or Diffusers.

    Args:
        shards: the jobs of each file.
        config: config.json, where Diffusers leaves its version.
    """
    stem = "diffusion_pytorch_model" if "_diffusers_version" in config else "model"
    if len(shards) == 1:
        return Named({f"{stem}.safetensors": shards[0]}, None)
    count = len(shards)
    names = [f"{stem}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    return Named(dict(zip(names, shards, strict=True)), f"{stem}.safetensors.index.json")


def write_shards(
    shards: Mapping[str, Sequence[Job]],
    staging: Staging,
    progress: Progress | None,
    metadata: Mapping[str, Mapping[str, str]] | None = None,
) -> Written:
    """Writes the jobs of each file but those that the staging has done already.

    Args:
        shards: file -> its jobs.
        staging: where to.
        progress: called as progress(bytes written, bytes in all, name of the tensor).
        metadata: file -> text entries of its header; `PYTORCH` where it has none.
    """
    total = sum(job.nbytes for jobs in shards.values() for job in jobs)
    done = left_out = 0
    places: dict[str, str] = {}
    for file, jobs in shards.items():
        specs = [spec for job in jobs for spec in job.tensors]
        places.update((spec.name, file) for spec in specs)
        target = staging.folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        with TensorWriter(target, specs, (metadata or {}).get(file, PYTORCH)) as writer:
            for number, job in enumerate(jobs):
                name = f"{file} {number}"
                if staging.is_done(name):
                    writer.skip(job.tensors)
                    done += job.nbytes
                    left_out += job.nbytes
                    continue
                for tensor, values in job.produce():
                    done += writer.append(tensor, values)
                    if progress is not None:
                        progress(done, total, tensor)
                staging.mark_done(name)
    return Written(places, left_out)


def index_of(places: Mapping[str, str], total: int) -> dict[str, Any]:
    """The index of several files: the file of every tensor, and their bytes together."""
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
