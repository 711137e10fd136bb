"""A new checkpoint put together in a target: files of tensors, their index, documents, and copied files."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moqext.reader.checkpoint_reader import CheckpointReader, Progress
from moqext.tools.convert.files import other_files
from moqext.tools.convert.jobs import Job
from moqext.tools.convert.shards import index_of, write_shards
from moqext.tools.convert.staging import Contents, Staging


class Files(NamedTuple):
    """Files of a new checkpoint.

    Attributes:
        shards: file of tensors -> the jobs that write it.
        index_file: the name of their index; None where they have none.
        documents: file -> its JSON value.
        copied: file -> the one of the source that it is a copy of.
        metadata: file of tensors -> text entries of its header, where they are not the usual ones.
    """

    shards: Mapping[str, Sequence[Job]]
    index_file: str | None
    documents: Mapping[str, Any]
    copied: Mapping[str, Path]
    metadata: Mapping[str, Mapping[str, str]] | None = None


class Assembled(NamedTuple):
    """Sizes and time of what has been written.

    Attributes:
        nbytes: size of the tensors.
        kept: bytes that an earlier run, which was ended, had written.
        seconds: wall time of reading, converting and writing them.
    """

    nbytes: int
    kept: int
    seconds: float


def files_beside(checkpoint: CheckpointReader) -> tuple[dict[str, Path], list[str]]:
    """The files to copy by their names, and sentences about what is left out.

    Nothing is copied from beside one file of several, where anything may be.
    """
    if checkpoint.file is not None:
        return {}, []
    others, left_out = other_files(checkpoint.directory, checkpoint.files.files)
    notes = [f"files not copied: {', '.join(left_out)}"] if left_out else []
    if checkpoint.component is not None:
        notes.append(f"it takes the place of {checkpoint.component} in the pipeline; nothing else is written")
    return {str(path.relative_to(checkpoint.directory)): path for path in others}, notes


def assemble(
    checkpoint: CheckpointReader,
    out: str | os.PathLike[str],
    files: Files,
    *,
    overwrite: bool,
    progress: Progress | None,
    key: str | None = None,
    check: Callable[[Path], None] | None = None,
    workers: int = 1,
) -> Assembled:
    """Writes the files into a hidden folder of `out`, which then change places with what is there.

    Args:
        checkpoint: the source.
        out: the target directory.
        files: what is written.
        overwrite: whether a checkpoint in the target may be replaced.
        progress: called as progress(bytes written, bytes in all, name of the tensor).
        key: of `Staging`.
        check: called with the folder when all files are in it; what it raises leaves the target as it was.
        workers: threads that jobs are run in.
    """
    total = sum(job.nbytes for jobs in files.shards.values() for job in jobs)
    beside = () if checkpoint.file is not None else checkpoint.directory.iterdir()
    contents = Contents(
        source=checkpoint.file or checkpoint.directory,
        read=(*beside, *files.copied.values(), *checkpoint.files.files),
        names=(*files.shards, *filter(None, [files.index_file]), *files.documents, *files.copied),
        nbytes=total + sum(path.stat().st_size for path in files.copied.values()),
    )
    with Staging(out, contents, overwrite=overwrite, key=key) as staging:
        begin = time.perf_counter()
        written = write_shards(files.shards, staging, progress, files.metadata, workers)
        seconds = time.perf_counter() - begin
        if files.index_file is not None:
            staging.write_json(files.index_file, index_of(written.places, total))
        staging.copy(files.copied)
        for name, document in files.documents.items():
            staging.write_json(name, document)
        if check is not None:
            check(staging.folder)
        staging.publish()
    return Assembled(total, written.left_out, seconds)
