"""Every kind of source, and every way in which one can be wrong."""

import gzip
import json
import os
from pathlib import Path

import pytest

from syncline.data.sources import PYTHON_STDLIB, documents
from syncline.errors import UserError


def write(path: Path, content: str | bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def json_lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def refusal(train_data: str | list[str], **options) -> str:
    with pytest.raises(UserError) as caught:
        list(documents(train_data, **options))
    return str(caught.value)


def test_a_file_is_one_document_byte_for_byte(tmp_path):
    content = "one\r\n\n zwei: é 你好 \U0001f30d\n"
    assert list(documents(write(tmp_path / "a.rst", content))) == [content]


def test_byte_order_mark_is_dropped(tmp_path):
    assert list(documents(write(tmp_path / "a.txt", b"\xef\xbb\xbfhello"))) == ["hello"]


def test_glob_descends_and_sorts(tmp_path):
    for name in ("b.txt", "deep/er/a.txt", "deep/c.txt", "deep/d.dat"):
        write(tmp_path / name, name)
    assert list(documents(f"{tmp_path}/**/*.txt")) == ["b.txt", "deep/c.txt", "deep/er/a.txt"]


def test_folder_takes_text_like_files_and_skips_hidden_ones(tmp_path):
    for name in ("z.md", "b/a.py", "b/image.png", ".git/x.txt", "b/.hidden.txt"):
        write(tmp_path / name, name)
    write(tmp_path / "c.jsonl", json_lines({"text": "from json"}))
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"zipped"))
    assert list(documents(str(tmp_path))) == ["b/a.py", "from json", "zipped", "z.md"]


def test_a_list_keeps_its_order_and_reads_a_file_once(tmp_path):
    first, second = write(tmp_path / "1.txt", "first"), write(tmp_path / "2.txt", "second")
    assert list(documents([second, f"{tmp_path}/*.txt", first])) == ["second", "first"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.jsonl.gz"])
def test_each_json_line_is_a_document(tmp_path, name):
    content = json_lines({"text": "a\nb", "id": 1}) + "\n" + json_lines({"text": ""}, {"text": "c"})
    path = write(tmp_path / name, gzip.compress(content.encode()) if name.endswith(".gz") else content)
    assert list(documents(path)) == ["a\nb", "c"]


def test_text_field(tmp_path):
    path = write(tmp_path / "a.jsonl", json_lines({"content": "x", "text": "y"}))
    assert list(documents(path, text_field="content")) == ["x"]


def test_the_limit_cuts_between_characters_and_stops_reading(tmp_path):
    write(tmp_path / "1.txt", "aé" * 3)
    write(tmp_path / "2.txt", "b" * 50)
    write(tmp_path / "3.txt", b"\xff never read")
    for limit in range(1, 60):
        joined = "".join(documents(str(tmp_path), limit_bytes=limit)).encode()
        assert limit - 1 <= len(joined) <= limit
        assert ("aé" * 3 + "b" * 50).encode().startswith(joined)


def test_the_limit_counts_every_file(tmp_path):
    path = write(tmp_path / "a.jsonl", json_lines(*({"text": "é" * 5} for _ in range(10))))
    assert list(documents(path, limit_bytes=25)) == ["é" * 5, "é" * 5, "é" * 2]


def test_the_standard_library_is_itself_without_its_tests():
    source = documents(PYTHON_STDLIB)
    paths = [file.path for file in source.files]
    assert Path(json.__file__) in paths
    assert paths == sorted(paths)
    assert not [path for path in paths if {"test", "idlelib", "site-packages"} & set(path.parts[-3:])]
    texts = list(documents(PYTHON_STDLIB, limit_bytes=300_000))
    assert texts == list(documents(PYTHON_STDLIB, limit_bytes=300_000))
    assert sum(len(text.encode()) for text in texts) == 300_000


def test_documents_can_be_iterated_again(tmp_path):
    source = documents(write(tmp_path / "a.txt", "again"))
    assert list(source) == list(source) == ["again"]


def test_fingerprint_follows_content_time_field_and_limit(tmp_path):
    path = write(tmp_path / "a.txt", "one")
    seen = {
        documents(path).fingerprint(),
        documents(path, "body").fingerprint(),
        documents(path, "text", 5).fingerprint(),
    }
    assert documents(path).fingerprint() in seen
    write(tmp_path / "a.txt", "longer")
    seen.add(documents(path).fingerprint())
    os.utime(path, ns=(1, 1))
    seen.add(documents(path).fingerprint())
    assert len(seen) == 5


def test_missing_path():
    message = refusal("nowhere/at_all.txt")
    assert "train_data 'nowhere/at_all.txt'" in message
    assert "no such file or folder" in message
    assert PYTHON_STDLIB in message


def test_missing_path_names_the_option_that_was_given():
    with pytest.raises(UserError, match="validation_data 'nowhere'"):
        documents("nowhere", option="validation_data")


def test_glob_without_a_match(tmp_path):
    assert "matches no file" in refusal(f"{tmp_path}/*.txt")


def test_folder_without_text(tmp_path):
    write(tmp_path / "a.png", "x")
    assert ".jsonl" in refusal(str(tmp_path))


def test_empty_list():
    assert "empty" in refusal([])


def test_nothing_but_empty_files(tmp_path):
    write(tmp_path / "a.txt", "")
    write(tmp_path / "b.txt", "")
    message = refusal(str(tmp_path))
    assert "2 file(s)" in message
    assert "no text" in message


@pytest.mark.parametrize("limit_bytes", [0, -5])
def test_limit_without_room(tmp_path, limit_bytes):
    assert str(limit_bytes) in refusal(write(tmp_path / "a.txt", "x"), limit_bytes=limit_bytes)


def test_undecodable_file_names_the_byte(tmp_path):
    path = write(tmp_path / "a.txt", b"0123\xff56")
    assert f"{path}: it is not UTF-8 text: byte 4" in refusal(path)


def test_a_file_that_ends_inside_a_character_is_not_excused_by_a_limit(tmp_path):
    path = write(tmp_path / "a.txt", b"0123\xc3")
    assert "byte 4" in refusal(path)
    assert "byte 4" in refusal(path, limit_bytes=100)


def test_undecodable_json_line_names_the_byte_in_the_file(tmp_path):
    path = write(tmp_path / "a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n')
    assert "byte 24" in refusal(path)


def test_bad_json_names_file_and_line(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "a"}\n\n{"text": \n')
    assert f"{path}, line 3: this is not JSON" in refusal(path)


def test_missing_field_names_those_that_are_there(tmp_path):
    message = refusal(write(tmp_path / "a.jsonl", json_lines({"content": "x", "id": 1})))
    assert "'text'" in message
    assert "'content', 'id'" in message


@pytest.mark.parametrize(
    ("line", "said"), [("[1]", "a list"), ('{"text": 3}', "a int"), ('{"text": "\\ud800"}', "surrogate")]
)
def test_json_that_is_not_text(tmp_path, line, said):
    assert said in refusal(write(tmp_path / "a.jsonl", line))


def test_json_document(tmp_path):
    assert ".jsonl" in refusal(write(tmp_path / "a.json", "{}"))


def test_truncated_gzip(tmp_path):
    path = write(tmp_path / "a.txt.gz", gzip.compress(os.urandom(1000).hex().encode())[:-20])
    assert "cannot be read" in refusal(path)


def test_file_that_vanishes(tmp_path):
    path = write(tmp_path / "a.txt", "x")
    source = documents(path)
    os.remove(path)
    with pytest.raises(UserError, match="cannot be read"):
        list(source)
    with pytest.raises(UserError, match="cannot be read"):
        source.fingerprint()
