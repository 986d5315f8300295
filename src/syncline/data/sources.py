"""Where text comes from: files, globs, folders, JSON lines and the running Python's own standard library."""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from syncline.errors import UserError

PYTHON_STDLIB = "python-stdlib"
JSON_LINES_SUFFIXES = (".jsonl", ".ndjson")
FOLDER_SUFFIXES = (".txt", ".md", ".py", *JSON_LINES_SUFFIXES)
"""What is read from a folder, each also with `.gz`. A file that is named, or matched by a glob, may have any suffix."""

_STDLIB_SKIPPED_FOLDERS = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}
_BYTE_ORDER_MARK = "\ufeff"
_READ_AHEAD_BYTES = 8
"""What a limited read takes beyond the limit: room for a byte order mark and for a character that the limit cuts."""


@dataclass(frozen=True)
class SourceFile:
    path: Path
    skip_undecodable: bool = False
    """Leave out a file that is not UTF-8 instead of raising: for files that are not the user's own."""


@dataclass(frozen=True)
class Documents:
    """The documents of some files, in a fixed order. Every iteration reads the files anew and yields the same texts.

    A text file is one document; each line of a JSON lines file is one. Empty documents are left out. Iterating raises
    `UserError` for a file that cannot be read, is not UTF-8 or holds bad JSON, and when there is no text at all.
    """

    option: str
    """The option that named the files, for error messages."""
    files: tuple[SourceFile, ...]
    text_field: str
    limit_bytes: int | None

    def __iter__(self) -> Iterator[str]:
        texts = self._texts() if self.limit_bytes is None else _limited(self._texts(), self.limit_bytes)
        found = False
        for text in texts:
            if text:
                found = True
                yield text
        if not found:
            given = f"{self.option} ({len(self.files)} file(s), the first is {self.files[0].path})"
            raise UserError(given, "there is no text in it", "Name files that hold text")

    def fingerprint(self) -> str:
        """A digest that changes when a file's path, size or modification time, the field or the limit changes."""
        digest = hashlib.sha256(repr((self.text_field, self.limit_bytes)).encode())
        digest.update(fingerprint_files([file.path for file in self.files]).encode())
        return digest.hexdigest()

    def _texts(self) -> Iterator[str]:
        for file in self.files:
            if _suffix(file.path) in JSON_LINES_SUFFIXES:
                yield from _json_lines(file.path, self.text_field)
            else:
                yield from _whole_file(file, self.limit_bytes)


def documents(
    train_data: str | Sequence[str],
    text_field: str = "text",
    limit_bytes: int | None = None,
    option: str = "train_data",
) -> Documents:
    """The documents that `train_data` names, in a deterministic order.

    `train_data` is a path, a glob (`**` descends), a folder (its files with one of `FOLDER_SUFFIXES`, recursively),
    `python-stdlib`, or a sequence of these. A file that is named twice is read once. Of all the text, in order, the
    first `limit_bytes` bytes of UTF-8 are taken; None takes everything. Raises `UserError` for what does not exist.
    """
    if limit_bytes is not None and limit_bytes <= 0:
        raise UserError(
            f"a limit of {limit_bytes} bytes on {option}", "leaves no text", "Use a positive limit, or none"
        )
    items = [train_data] if isinstance(train_data, str) else list(train_data)
    if not items:
        raise UserError(f"{option} []", "the list is empty", "Name at least one file, folder or glob")
    files = {file.path: file for item in items for file in _resolve(item, option)}
    return Documents(option, tuple(files.values()), text_field, limit_bytes)


def fingerprint_files(paths: Sequence[Path]) -> str:
    """A digest of the paths, sizes and modification times of `paths`; their content is not read."""
    digest = hashlib.sha256()
    for path in paths:
        try:
            status = path.stat()
        except OSError as error:
            raise _unreadable(path, error) from error
        digest.update(repr((str(path.absolute()), status.st_size, status.st_mtime_ns)).encode())
    return digest.hexdigest()


def _resolve(item: str, option: str) -> list[SourceFile]:
    if item == PYTHON_STDLIB:
        return _standard_library_files()
    path = Path(item)
    if path.is_dir():
        return _folder_files(path, option)
    if path.exists():
        return [SourceFile(_checked(path))]
    if not glob.has_magic(item):
        instead = f"Write an existing file, folder or glob, or {PYTHON_STDLIB!r}"
        raise UserError(f"{option} {item!r}", f"there is no such file or folder in {Path.cwd()}", instead)
    matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
    files = [SourceFile(_checked(match)) for match in matches if match.is_file()]
    if not files:
        raise UserError(f"{option} {item!r}", "the glob matches no file", "Check it with ls; ** descends into folders")
    return files


def _folder_files(folder: Path, option: str) -> list[SourceFile]:
    paths = sorted(path for path in folder.rglob("*") if _suffix(path) in FOLDER_SUFFIXES and path.is_file())
    files = [SourceFile(path) for path in paths if not _is_hidden(path.relative_to(folder))]
    if not files:
        wrong = f"the folder holds no file that ends in {', '.join(FOLDER_SUFFIXES)}"
        raise UserError(f"{option} {str(folder)!r}", wrong, f"Name the files by a glob, such as {folder}/**/*.rst")
    return files


def _standard_library_files() -> list[SourceFile]:
    """The standard library's own modules; its tests, its editor and anything installed beside it are left out."""
    root = Path(sysconfig.get_path("stdlib"))
    paths: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _STDLIB_SKIPPED_FOLDERS]
        paths.extend(Path(folder, name) for name in names if name.endswith(".py"))
    if not paths:
        raise UserError(PYTHON_STDLIB, f"this Python keeps no source files in {root}", "Name a folder of your own text")
    return [SourceFile(path, skip_undecodable=True) for path in sorted(paths)]


def _checked(path: Path) -> Path:
    if _suffix(path) == ".json":
        raise UserError(str(path), "a .json file is one value, not documents", "Write one object per line to a .jsonl")
    return path


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _suffix(path: Path) -> str:
    """The suffix that says what the file holds, `.gz` aside."""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def _whole_file(file: SourceFile, limit_bytes: int | None) -> Iterator[str]:
    """One document, or none if it may be skipped. Of a longer file only its first `limit_bytes` are read."""
    try:
        with _open(file.path) as handle:
            content = handle.read(-1 if limit_bytes is None else limit_bytes + _READ_AHEAD_BYTES)
            is_whole = not handle.read(1)
    except (OSError, EOFError) as error:
        raise _unreadable(file.path, error) from error
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        cut_by_limit = not is_whole and error.end == len(content) and error.reason == "unexpected end of data"
        if cut_by_limit:
            text = content[: error.start].decode()
        elif file.skip_undecodable:
            return
        else:
            raise _undecodable(file.path, error.start) from error
    yield text.removeprefix(_BYTE_ORDER_MARK)


def _json_lines(path: Path, text_field: str) -> Iterator[str]:
    try:
        with _open(path) as handle:
            offset = 0
            for number, line in enumerate(handle, start=1):
                try:
                    content = line.decode().removeprefix(_BYTE_ORDER_MARK)
                except UnicodeDecodeError as error:
                    raise _undecodable(path, offset + error.start) from error
                offset += len(line)
                if content.strip():
                    yield _text_of_line(content, f"{path}, line {number}", text_field)
    except (OSError, EOFError) as error:
        raise _unreadable(path, error) from error


def _text_of_line(content: str, place: str, text_field: str) -> str:
    try:
        record = json.loads(content)
    except json.JSONDecodeError as error:
        raise UserError(place, f"this is not JSON: {error}", "Write one JSON object per line") from error
    if not isinstance(record, dict):
        wrong = f"the line holds a {type(record).__name__}, not an object"
        raise UserError(place, wrong, f'Write {{"{text_field}": "..."}}')
    if text_field not in record:
        names = ", ".join(repr(name) for name in record) or "none"
        wrong = f"there is no field {text_field!r}; the fields are: {names}"
        raise UserError(place, wrong, "Set text_field to the one that holds the text")
    text = record[text_field]
    if not isinstance(text, str):
        wrong = f"the field {text_field!r} holds a {type(text).__name__}, not a string"
        raise UserError(place, wrong, "Set text_field to a field that holds text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        wrong = f"the field {text_field!r} escapes half of a surrogate pair at character {error.start}"
        raise UserError(place, wrong, "Escape the whole pair, or leave it out") from error
    return text


def _open(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _limited(texts: Iterator[str], limit_bytes: int) -> Iterator[str]:
    """The first `limit_bytes` bytes of UTF-8 of `texts`, less the bytes of a character that the limit would cut."""
    remaining = limit_bytes
    for text in texts:
        content = text.encode()
        if len(content) >= remaining:
            yield content[:remaining].decode(errors="ignore")
            return
        remaining -= len(content)
        yield text


def _undecodable(path: Path, byte: int) -> UserError:
    return UserError(
        str(path), f"it is not UTF-8 text: byte {byte} cannot be decoded", "Convert it with iconv -t UTF-8"
    )


def _unreadable(path: Path, error: Any) -> UserError:
    return UserError(str(path), f"it cannot be read: {error}", "Check that it exists, is whole and may be read")
