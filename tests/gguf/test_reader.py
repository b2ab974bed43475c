"""Opening files: parts, views, typed access, and files that cannot be opened at all."""

import gc
import itertools
import os
import random
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from llamay.errors import GGUFError
from llamay.formats import Format
from llamay.gguf import GGUFFile, open_gguf
from tests.gguf_writer import float_tensor, write_gguf, write_split_gguf

GGUF_PY = Path(__file__).parents[2] / "testdata" / "gguf"


def refusal(path):
    with pytest.raises(GGUFError) as caught:
        open_gguf(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


def test_a_file_of_gguf_py_with_every_type_is_read():
    with open_gguf(GGUF_PY / "every_type.gguf") as file:
        arrays = {key: file.metadata[key] for key in ("int32s", "float32s", "bools")}
        nested = file.metadata["nested"]
        scalars = {
            key: value
            for key, value in file.metadata.items()
            if key not in arrays and key != "nested"
        }
        assert scalars == {
            "general.architecture": "llama",
            "general.alignment": 64,
            "uint8": 200,
            "int8": -100,
            "uint16": 60000,
            "int16": -30000,
            "uint32": 4000000000,
            "int32": -2000000000,
            "uint64": 2**63 + 1,
            "int64": -(2**63),
            "float32": float(np.float32(0.1)),
            "float64": 0.1,
            "bool": True,
            "string": "naïve 中文",
            "strings": ["", "Ġthe", "é"],
        }
        assert {key: (array.dtype.str, array.tolist()) for key, array in arrays.items()} == {
            "int32s": ("<i4", [1, -2, 3]),
            "float32s": ("<f4", [0.5, -1.25]),
            "bools": ("|b1", [True, False]),
        }
        assert [array.tolist() for array in nested] == [[1, 2], [3]]

        assert list(file.tensors) == ["float", "blocks"]
        tensor = file.tensors["float"]
        assert (tensor.format, tensor.shape) == (Format.F32, (2, 3))
        assert np.frombuffer(tensor.data, np.float32).tolist() == [0, 1, 2, 3, 4, 5]
        blocks = file.tensors["blocks"]
        assert (blocks.format, blocks.shape) == (Format.Q8_0, (2, 32))
        assert bytes(blocks.data) == bytes(range(68))


def test_all_parts_of_a_split_file_of_gguf_py_are_opened():
    with open_gguf(GGUF_PY / "split-00001-of-00003.gguf") as file:
        assert [path.name for path in file.paths] == [
            "split-00001-of-00003.gguf",
            "split-00002-of-00003.gguf",
            "split-00003-of-00003.gguf",
        ]
        assert file.path == file.paths[0]
        assert file.metadata["general.architecture"] == "llama"
        values = {name: np.frombuffer(t.data, np.float32) for name, t in file.tensors.items()}
        assert {name: value.tolist() for name, value in values.items()} == {
            "t0": [0.0] * 4,
            "t1": [1.0] * 4,
            "t2": [2.0] * 4,
        }


@pytest.mark.model
def test_the_default_model_has_the_figures_that_gguf_py_reads(default_model_path):
    with open_gguf(default_model_path) as file:
        assert len(file.metadata) == 33
        assert len(file.tensors) == 272
        assert file.get("general.architecture", str) == "llama"
        assert file.get("llama.embedding_length", int) == 576
        assert file.get("llama.rope.freq_base", float) == 100000.0
        assert file.get("llama.attention.layer_norm_rms_epsilon", float) == 9.999999747378752e-06
        assert file.get("tokenizer.ggml.add_bos_token", bool) is False
        tokens = file.get("tokenizer.ggml.tokens", list)
        assert len(tokens) == 49152
        assert tokens[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        assert tokens[-1] == "ectable"
        merges = file.get("tokenizer.ggml.merges", list)
        assert (len(merges), merges[0], merges[-1]) == (48900, "Ġ t", "ect able")
        types = file.get("tokenizer.ggml.token_type", np.ndarray)
        assert (types.shape, types[0], types[-1]) == ((49152,), 3, 1)
        embedding = file.tensors["token_embd.weight"]
        assert (embedding.format, embedding.shape) == (Format.Q8_0, (49152, 576))
        assert embedding.data.nbytes == 30081024
        assert bytes(embedding.data[:8]).hex() == "3219d60d13f7e5ee"
        assert list(file.tensors)[-1] == "output_norm.weight"
        norm = np.frombuffer(file.tensors["output_norm.weight"].data, np.float32)
        assert (norm[0], norm[1], norm[-1]) == (1.7578125, 1.8203125, 1.984375)


def test_a_large_vocabulary_is_parsed_in_time(tmp_path):
    """151,936 tokens, as Qwen 2.5 has, and about as many merges."""
    rng = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyzĠĊ中é"
    words = ["".join(rng.choices(letters, k=rng.randint(1, 12))) for _ in range(151_936)]
    merges = [f"{a} {b}" for a, b in itertools.pairwise(words)]
    types = np.ones(len(words), np.int32)
    metadata = {"tokens": words, "merges": merges, "types": types}
    path = write_gguf(tmp_path / "vocabulary.gguf", metadata)

    seconds = []
    for _ in range(3):
        started = time.process_time()
        with open_gguf(path) as file:
            seconds.append(time.process_time() - started)
    assert file.metadata["tokens"] == words
    assert file.metadata["merges"] == merges
    assert (file.metadata["types"] == types).all()
    assert min(seconds) < 0.3


def test_tensors_are_views_of_the_mapped_file_and_nothing_is_copied(tmp_path):
    array = np.zeros(1 << 20, np.float32)
    path = write_gguf(tmp_path / "m.gguf", {}, {"t": float_tensor(array)})
    tracemalloc.start()
    try:
        file = open_gguf(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 200_000
    data = file.tensors["t"].data
    assert data.readonly
    assert data.nbytes == 4 << 20
    with path.open("r+b") as on_disk:  # a view shows what the file holds now
        on_disk.seek(-4, os.SEEK_END)
        on_disk.write(np.float32(7).tobytes())
    assert np.frombuffer(data, np.float32)[-1] == 7


@pytest.mark.parametrize("alignment", [8, 32, 64, 4096])
def test_tensors_start_at_the_files_alignment(tmp_path, alignment):
    tensors = {f"t{i}": float_tensor(np.full((i, 3), i, np.float32)) for i in range(1, 5)}
    path = write_gguf(tmp_path / "m.gguf", {"k": "text"}, tensors, alignment=alignment)
    with open_gguf(path) as file:
        for i in range(1, 5):
            array = np.frombuffer(file.tensors[f"t{i}"].data, np.float32)
            assert array.tolist() == [i] * (3 * i)
            assert array.ctypes.data % min(alignment, 4096) == 0


def test_close_frees_the_mapping_but_never_under_a_view(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", {"k": 1}, {"t": float_tensor(np.ones(4, np.float32))})

    def is_mapped():
        if not Path("/proc/self/maps").exists():
            pytest.skip("needs /proc/self/maps")
        gc.collect()
        return str(path) in Path("/proc/self/maps").read_text()

    with open_gguf(path):
        assert is_mapped()
    assert not is_mapped()

    with open_gguf(path) as file:
        array = np.frombuffer(file.tensors["t"].data, np.float32)
    file.close()
    assert array.tolist() == [1, 1, 1, 1]
    assert file.tensors == {}
    assert file.metadata == {"k": 1}
    assert is_mapped()
    del array
    assert not is_mapped()


def test_a_refused_file_does_not_stay_open(tmp_path):
    parts = write_split_gguf(tmp_path, "m", {}, [{"t": float_tensor(np.ones(4, np.float32))}] * 2)
    before = os.listdir("/dev/fd")
    with pytest.raises(GGUFError, match="'t': expected it in one part, found it in an earlier"):
        open_gguf(parts[0])
    gc.collect()
    assert len(os.listdir("/dev/fd")) == len(before)


class TestGet:
    @pytest.fixture
    def file(self, tmp_path):
        metadata = {
            "int": 3,
            "negative": -3,
            "float": 0.5,
            "bool": True,
            "text": "a",
            "texts": ["a"],
            "numbers": np.array([1], np.int64),
            "arrays": [["a"]],
            "zero": 0,
            "empty": [],
        }
        with open_gguf(write_gguf(tmp_path / "m.gguf", metadata)) as file:
            yield file

    @pytest.mark.parametrize(
        ("key", "kind", "value"),
        [
            ("int", int, 3),
            ("negative", int, -3),
            ("float", float, 0.5),
            ("bool", bool, True),
            ("text", str, "a"),
            ("texts", list, ["a"]),
            ("numbers", np.ndarray, np.array([1])),
            ("arrays", list, [["a"]]),
            ("zero", int, 0),
            ("empty", list, []),
            ("int", float, 3.0),
        ],
    )
    def test_gives_the_value_as_the_kind_asked_for(self, file, key, kind, value):
        assert file.get(key, kind, None) == value
        assert type(file.get(key, kind)) is kind

    @pytest.mark.parametrize(
        ("key", "kind", "words"),
        [
            ("text", int, "key 'text': expected an integer, found a string"),
            ("bool", int, "key 'bool': expected an integer, found a bool"),
            ("int", bool, "key 'int': expected a bool, found an integer"),
            ("float", int, "key 'float': expected an integer, found a float"),
            ("bool", float, "key 'bool': expected a float, found a bool"),
            ("numbers", int, "key 'numbers': expected an integer, found an array of numbers"),
            ("texts", str, "key 'texts': expected a string, found a list"),
            ("arrays", str, "key 'arrays': expected a string, found a list"),
            ("numbers", list, "expected a list, found an array of numbers"),
        ],
    )
    def test_refuses_another_kind_even_with_a_default(self, file, key, kind, words):
        for default in ((), (None,)):
            with pytest.raises(GGUFError) as caught:
                file.get(key, kind, *default)
            assert str(caught.value).startswith(f"{file.path}: ")
            assert words in str(caught.value)

    def test_an_absent_key_gives_the_default_or_is_refused(self, file):
        assert file.get("absent", int, 7) == 7
        assert file.get("absent", int, None) is None
        with pytest.raises(GGUFError, match="key 'absent': expected a string, found no such key"):
            file.get("absent", str)


class TestSplitFiles:
    @pytest.fixture
    def parts(self, tmp_path):
        tensors = [{f"t{i}": float_tensor(np.full(4, i, np.float32))} for i in (1, 2)]
        return write_split_gguf(tmp_path, "m", {"k": "v"}, [{}, *tensors])

    def test_a_first_part_without_tensors_opens_the_others(self, parts):
        with open_gguf(parts[0]) as file:
            assert isinstance(file, GGUFFile)
            assert list(file.tensors) == ["t1", "t2"]
            assert file.paths == tuple(parts)

    def test_a_later_part_says_to_open_the_first(self, parts):
        message = refusal(parts[2])
        assert "found part 3 of 3" in message
        assert "open m-00001-of-00003.gguf instead" in message

    def test_a_missing_part_is_named(self, parts):
        parts[1].unlink()
        message = refusal(parts[0])
        assert "expected part 2 of 3" in message
        assert "found no m-00002-of-00003.gguf" in message

    def test_a_first_part_with_another_name_is_refused(self, parts):
        renamed = parts[0].rename(parts[0].with_name("model.gguf"))
        message = refusal(renamed)
        assert "expected the name NAME-00001-of-00003.gguf" in message
        assert "found model.gguf" in message

    def test_parts_in_the_wrong_order_are_refused(self, parts):
        third = parts[2].read_bytes()
        parts[2].write_bytes(parts[1].read_bytes())
        parts[1].write_bytes(third)
        with pytest.raises(GGUFError, match=r"00002-of-00003.gguf: expected part 2 of 3, found pa"):
            open_gguf(parts[0])

    def test_a_part_of_another_split_is_refused(self, parts, tmp_path):
        other = write_split_gguf(tmp_path, "other", {}, [{}, {}])
        parts[1].write_bytes(other[1].read_bytes())
        with pytest.raises(GGUFError, match="expected part 2 of 3, found part 2 of 2"):
            open_gguf(parts[0])

    def test_a_part_without_its_tensors_is_refused(self, parts):
        split = {"split.no": np.uint16(1), "split.count": np.uint16(3)}
        write_gguf(parts[1], split)
        assert "expected 2 tensors in all 3 parts, found 1" in refusal(parts[0])

    def test_a_damaged_part_is_named(self, parts):
        parts[1].write_bytes(parts[1].read_bytes()[:40])
        with pytest.raises(GGUFError, match=r"m-00002-of-00003\.gguf: .*truncated"):
            open_gguf(parts[0])

    @pytest.mark.parametrize("count", [1, 2**16, 2**63])
    def test_a_count_that_no_name_can_have_opens_nothing_else(self, tmp_path, count):
        metadata = {"split.no": 0, "split.count": np.uint64(count)}
        path = write_gguf(tmp_path / "a-00001-of-00003.gguf", metadata)
        if count == 1:
            assert open_gguf(path).paths == (path,)
        else:
            assert f"of-{count:05d}.gguf" in refusal(path)

    def test_split_keys_of_the_wrong_kind_are_refused(self, tmp_path):
        path = write_gguf(tmp_path / "a-00001-of-00002.gguf", {"split.count": "2"})
        assert "key 'split.count': expected an integer, found a string" in refusal(path)


class TestFilesThatCannotBeOpened:
    def test_absent(self, tmp_path):
        assert "No such file or directory" in refusal(tmp_path / "absent.gguf")

    def test_directory(self, tmp_path):
        assert "found a directory" in refusal(tmp_path)

    def test_empty_file(self, tmp_path):
        path = tmp_path / "empty.gguf"
        path.touch()
        assert "found an empty file" in refusal(path)

    def test_named_pipe_does_not_block(self, tmp_path):
        path = tmp_path / "pipe.gguf"
        os.mkfifo(path)
        assert "neither a file nor a directory" in refusal(path)

    def test_path_with_a_nul(self):
        assert "null" in refusal("a\0b.gguf")

    def test_path_through_a_file(self, tmp_path):
        (tmp_path / "file").touch()
        assert "Not a directory" in refusal(tmp_path / "file" / "m.gguf")

    def test_permission_denied(self, tmp_path):
        path = write_gguf(tmp_path / "m.gguf", {})
        path.chmod(0)
        user = os.geteuid()
        try:
            if user == 0:  # root may read everything
                os.seteuid(65534)
            message = refusal(path)
        finally:
            os.seteuid(user)
        assert "Permission denied" in message


def test_a_file_cut_after_opening_is_noticed_before_it_is_read(tmp_path):
    array = np.ones(100_000, np.float32)
    path = write_gguf(tmp_path / "m.gguf", {}, {"t": float_tensor(array)})
    size = path.stat().st_size
    with open_gguf(path) as file:
        file.check_size()
        os.truncate(path, 8192)
        with pytest.raises(GGUFError, match=f"expected {size} bytes .* found 8192"):
            file.check_size()
