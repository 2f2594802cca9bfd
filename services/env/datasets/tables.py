"""Parquet, read as untrusted input: rows as arrays, with a sentence for everything that is not as it should be.

In: parquet files of a data set. Out: numpy arrays of single columns, `EpisodeRows` of an episode. Never: a whole table
in memory because somebody's file is large (sizes are checked before reading), or a number that is not finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from services.env.datasets.folder import DatasetFolder
from services.env.datasets.layout import EpisodeSource, Layout, Vector
from services.env.datasets.report import Findings

MAX_COLUMN_BYTES = 4 << 30  # of the columns read from one file, uncompressed
MAX_ROWS = 50_000_000  # of one file
UNREADABLE_TABLE = (pa.ArrowException, OSError, UnicodeError)
"""What pyarrow raises over a file; the last over names of columns."""
_MAX_INTEGER = 2.0**53  # beyond it float64 does not count any more

Floats = npt.NDArray[np.float32]


class EpisodeRows(NamedTuple):
    """The numbers of one episode.

    Attributes:
        state: [T, S] float32.
        action: [T, A] float32.
        timestamp: [T] float64, seconds from the episode's first step.
        task_index: [T] int64, or None if the table has none.
        first_row: row of step 0 in its parquet file.
    """

    state: Floats
    action: Floats
    timestamp: npt.NDArray[np.float64]
    task_index: npt.NDArray[np.int64] | None
    first_row: int


def open_table(folder: DatasetFolder, name: str) -> pq.ParquetFile:
    """Open a parquet file; DatasetError if it is missing, truncated or absurdly long."""
    path = folder.path(name)
    try:
        file = pq.ParquetFile(path)
        names = file.schema_arrow.names
    except UNREADABLE_TABLE as error:
        raise folder.findings.fail(name, "is truncated or no parquet file: copy it again") from error
    if len(set(names)) < len(names):
        raise folder.findings.fail(name, "has several columns of one name: write it again")
    if file.metadata.num_rows > MAX_ROWS:
        raise folder.findings.fail(
            name, f"has {file.metadata.num_rows} rows, more than the {MAX_ROWS} that can be read"
        )
    return file


def read_columns(folder: DatasetFolder, name: str, columns: Sequence[str]) -> pa.Table:
    """Read some columns of a parquet file (those it has); DatasetError if it is damaged or too large."""
    file = open_table(folder, name)
    wanted = [column for column in columns if column in file.schema_arrow.names]
    check_size(folder, name, file, wanted, range(file.metadata.num_row_groups))
    try:
        return file.read(columns=wanted)
    except UNREADABLE_TABLE as error:
        raise folder.findings.fail(name, "is damaged: some of its rows cannot be read, copy it again") from error


def check_size(
    folder: DatasetFolder, name: str, file: pq.ParquetFile, columns: Sequence[str], row_groups: Sequence[int]
) -> None:
    """Raise DatasetError if some columns of some row groups would take too much memory."""
    nbytes = 0
    for group in (file.metadata.row_group(number) for number in row_groups):
        chunks = (group.column(i) for i in range(group.num_columns))
        nbytes += sum(c.total_uncompressed_size for c in chunks if c.path_in_schema.split(".")[0] in columns)
    if nbytes > MAX_COLUMN_BYTES:
        raise folder.findings.fail(name, f"holds {nbytes >> 30} GiB in one part, too much to read: use smaller files")


def iterate_rows(folder: DatasetFolder, layout: Layout) -> Iterator[tuple[EpisodeSource, EpisodeRows | None]]:
    """Read all episodes in order, each file once; rows are None where an error was noted."""
    columns = [layout.state.column, layout.action.column, "timestamp", "frame_index", "episode_index", "task_index"]
    loaded, table = "", pa.table({})
    for episode in layout.episodes:
        if episode.table != loaded:
            loaded, table = episode.table, read_columns(folder, episode.table, columns)
        yield episode, _episode_rows(table, episode, layout, folder.findings)


def _episode_rows(table: pa.Table, episode: EpisodeSource, layout: Layout, findings: Findings) -> EpisodeRows | None:
    where = f"episode {episode.number}"
    numbers = _scalars(table, "episode_index", np.int64)
    first = 0
    if layout.shared_files:
        if numbers is None:
            findings.error(episode.table, "has no column 'episode_index', so that its episodes cannot be told apart")
            return None
        rows = np.flatnonzero(numbers == episode.number)
        if len(rows) == 0 or len(rows) != rows[-1] - rows[0] + 1:
            findings.error(where, f"its rows are missing or scattered in {episode.table}: write the set again")
            return None
        first, table = int(rows[0]), table.slice(rows[0], len(rows))
    elif numbers is not None and (numbers != episode.number).any():
        findings.error(where, f"the column episode_index of {episode.table} names another episode: rename the file")
        return None
    if table.num_rows == 0:
        findings.error(where, f"has no rows in {episode.table}: remove the episode")
        return None
    state = _vectors(table, layout.state, where, findings)
    action = _vectors(table, layout.action, where, findings)
    timestamp = _timestamps(table, layout.fps, where, findings)
    order = _scalars(table, "frame_index", np.int64)
    if order is None:
        findings.warn_often(
            where, "there is no column frame_index: the order of the rows is taken as that of the steps"
        )
    elif (order != np.arange(table.num_rows)).any():
        findings.error(where, "its frame_index does not count 0, 1, 2 …: sort the rows, or write the set again")
        return None
    if state is None or action is None:
        return None
    return EpisodeRows(state, action, timestamp, _scalars(table, "task_index", np.int64), first)


def _vectors(table: pa.Table, vector: Vector, where: str, findings: Findings) -> Floats | None:
    """Return a vector column as [T, dim] float32, or None after noting what is wrong."""
    if vector.column not in table.column_names:
        findings.error(where, f"has no column '{vector.column}', which meta/info.json declares")
        return None
    column, rows = table[vector.column].combine_chunks(), table.num_rows
    if isinstance(column, pa.ChunkedArray):  # pyarrow keeps an empty column chunked
        column = pa.concat_arrays(column.chunks)
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type) or pa.types.is_fixed_size_list(column.type):
        lengths = column.value_lengths().to_numpy(zero_copy_only=False)
        wrong = np.flatnonzero(~(lengths == vector.dim))  # a missing row has length NaN
        if len(wrong):
            step = int(wrong[0])
            findings.error(
                where,
                f"'{vector.column}' has {lengths[step]} numbers at step {step}, but info.json declares {vector.dim}",
            )
            return None
        column = column.flatten()
    elif vector.dim != 1:
        findings.error(where, f"'{vector.column}' holds {column.type}, but {vector.dim} numbers a step are declared")
        return None
    if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type) or pa.types.is_boolean(column.type)):
        findings.error(where, f"'{vector.column}' holds {column.type}, not numbers")
        return None
    if column.type == pa.float64():
        findings.warn_often(where, f"'{vector.column}' is stored as float64: it is read as float32")
    with np.errstate(over="ignore"):  # what does not fit becomes infinite and is refused below
        values: Floats = column.to_numpy(zero_copy_only=False).astype(np.float32).reshape(rows, vector.dim)
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        step, element = int(bad[0][0]), int(bad[0][1])
        label = f" ({vector.names[element]})" if vector.names else ""
        findings.error(
            where,
            f"'{vector.column}[{element}]'{label} is {values[step, element]} at step {step}, and {len(bad)} numbers of "
            "the episode are not finite: repair or remove the episode",
        )
        return None
    return values


def _scalars(table: pa.Table, column: str, dtype: type[np.generic]) -> npt.NDArray[np.int64] | None:
    """Return a column of one integer a row, or None if it is missing or something else."""
    if column not in table.column_names:
        return None
    values: npt.NDArray[np.generic] = table[column].to_numpy()
    if values.dtype == object:  # lists of one number; text and the like become NaN
        values = np.array([_only_number(value) for value in values])
    if values.dtype.kind not in "iuf" or not (np.abs(values.astype(np.float64)) < _MAX_INTEGER).all():  # NaN neither
        return None
    return values.astype(np.int64)


def _only_number(value: object) -> float:
    if isinstance(value, np.ndarray) and value.shape == (1,) and value.dtype.kind in "iuf":
        return float(value[0])
    return np.nan


def _timestamps(table: pa.Table, fps: float, where: str, findings: Findings) -> npt.NDArray[np.float64]:
    """Return seconds from the first step on, [T]; says what is odd about those that are stored."""
    nominal = np.arange(table.num_rows, dtype=np.float64) / fps
    values = table["timestamp"].to_numpy() if "timestamp" in table.column_names else None
    if values is None or values.dtype.kind != "f" or not np.isfinite(values).all():
        findings.warn_often(where, "there are no usable timestamps: step number / fps is taken")
        return nominal
    seconds: npt.NDArray[np.float64] = values.astype(np.float64)
    if abs(seconds[0]) > 1e-4:
        findings.warn_often(where, "timestamps do not start at 0: they are counted from the first step")
    seconds = seconds - seconds[0]
    if np.abs(np.diff(seconds) - 1 / fps).max(initial=0.0) > 0.5 / fps:
        findings.warn_often(where, f"timestamps do not advance by 1/fps ({1 / fps:.4g} s) a step: the row order counts")
    return seconds
