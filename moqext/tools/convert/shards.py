"""The files of tensors of a new checkpoint: their names, the tensors of each, and the index of several."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from threading import Event, Lock
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
    workers: int = 1,
) -> Written:
    """Writes the jobs of each file but those that the staging has done already.

    Args:
        shards: file -> its jobs.
        staging: where to.
        progress: called as progress(bytes written, bytes in all, name of the tensor).
        metadata: file -> text entries of its header; `PYTORCH` where it has none.
        workers: threads that the jobs of a file are run in, one after the other with one.
    """
    total = sum(job.nbytes for jobs in shards.values() for job in jobs)
    told = _Told(total, progress)
    left_out = 0
    places: dict[str, str] = {}
    for file, jobs in shards.items():
        specs = [spec for job in jobs for spec in job.tensors]
        places.update((spec.name, file) for spec in specs)
        target = staging.folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        with TensorWriter(target, specs, (metadata or {}).get(file, PYTORCH)) as writer:
            left: list[tuple[str, Job]] = []
            for number, job in enumerate(jobs):
                name = f"{file} {number}"
                if staging.is_done(name):
                    writer.skip(job.tensors)
                    told.skip(job.nbytes)
                    left_out += job.nbytes
                else:
                    left.append((name, job))
            _write_jobs(left, writer, staging, told, workers)
    return Written(places, left_out)


class _Told:
    """Bytes that are written, told to a caller by any thread."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total = total
        self._progress = progress
        self._done = 0
        self._lock = Lock()

    def skip(self, nbytes: int) -> None:
        """Counts bytes without telling."""
        self._done += nbytes

    def __call__(self, nbytes: int, tensor: str) -> None:
        """Counts and tells what has been written of a tensor."""
        with self._lock:
            self._done += nbytes
            if self._progress is not None:
                self._progress(self._done, self._total, tensor)


def _write_jobs(
    jobs: Sequence[tuple[str, Job]], writer: TensorWriter, staging: Staging, told: _Told, workers: int
) -> None:
    """Writes jobs by their names in the journal; where one fails or is interrupted, the others end early."""
    ended = Event()

    def write(name: str, job: Job) -> None:
        try:
            for tensor, values in job.produce():
                told(writer.append(tensor, values), tensor)
                if ended.is_set():
                    return
        except BaseException:
            ended.set()
            raise
        staging.mark_done(name)

    if workers == 1:
        for name, job in jobs:
            write(name, job)
        return
    with ThreadPoolExecutor(workers) as pool:
        running = [pool.submit(write, name, job) for name, job in jobs]
        try:
            for each in as_completed(running):
                each.result()
        except BaseException:
            ended.set()
            pool.shutdown(cancel_futures=True)
            raise


def index_of(places: Mapping[str, str], total: int) -> dict[str, Any]:
    """The index of several files: the file of every tensor, and their bytes together."""
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
