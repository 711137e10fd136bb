"""The safetensors files of a run: names, the tensors of each, and the index of several."""

from collections.abc import Mapping, Sequence

from moqext.reader.checkpoint_reader import Progress
from moqext.tools.convert.files import INDEX_FILE
from moqext.tools.convert.jobs import Job
from moqext.tools.convert.staging import Staging
from moqext.tools.convert.writer import TensorWriter


def name_shards(shards: Sequence[Sequence[Job]]) -> dict[str, Sequence[Job]]:
    """The jobs by the file that they write."""
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {
        f"model-{number:05}-of-{len(shards):05}.safetensors": jobs for number, jobs in enumerate(shards, 1)
    }


def write_shards(shards: Mapping[str, Sequence[Job]], staging: Staging, progress: Progress | None) -> int:
    """Writes the files and, for several, the index; jobs that the staging has done already are left out.

    Returns:
        Bytes that were left out.
    """
    total = sum(job.nbytes for jobs in shards.values() for job in jobs)
    done = left_out = 0
    places: dict[str, str] = {}
    for file, jobs in shards.items():
        specs = [spec for job in jobs for spec in job.tensors]
        places.update((spec.name, file) for spec in specs)
        with TensorWriter(staging.folder / file, specs, {"format": "pt"}) as writer:
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
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        staging.write_json(INDEX_FILE, index)
    return left_out
