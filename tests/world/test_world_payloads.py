from __future__ import annotations

import contextlib
import json

import pytest
import torch

from echo_hooks.errors import UsageError
from echo_hooks.world import PayloadStore
from echo_hooks.world.payloads import ABSENT, Payload, bytes_tensor, json_plain, tensor_bytes


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.float32, torch.bool, torch.uint8, torch.float16])
def test_tensors_survive_exactly(dtype):
    tensor = torch.tensor([0, 1, 3, 0]).to(dtype)
    assert torch.equal(bytes_tensor(tensor_bytes(tensor), dtype), tensor)
    assert bytes_tensor(tensor_bytes(tensor[:0]), dtype).shape == (0,)
    assert torch.equal(bytes_tensor(tensor_bytes(tensor[2]), dtype), tensor[2:3])


def test_files_come_back(tmp_path):
    store = PayloadStore(tmp_path)
    store.put(3, "collective/0/0/0", Payload("broadcast", 8, "int64", b"\x01" + bytes(7)))
    store.put(3, "collective/0/1/objects", Payload("all_gather_object", 20, "object", object=[{"a": [1, None, 2.5]}]))
    store.save()
    assert [p.name for p in tmp_path.iterdir()] == ["00003.json"]
    again = PayloadStore(tmp_path)
    assert again.ranks() == [3]
    for key in ("collective/0/0/0", "collective/0/1/objects"):
        assert again.get(3, key) == store.get(3, key)
    assert again.get(3, "other") is None and again.get(4, "collective/0/0/0") is None


def test_same_payloads_same_file(tmp_path):
    texts = []
    for name in ("a", "b"):
        store = PayloadStore(tmp_path / name)
        store.put(0, "k", Payload("send", 4, "int32", b"abcd"))
        store.save()
        texts.append((tmp_path / name / "00000.json").read_bytes())
    assert texts[0] == texts[1]


def test_tracing_again_forgets_the_first_trace(tmp_path):
    store = PayloadStore(tmp_path)
    store.put(0, "k", Payload("send", 4, "int32", b"abcd"))
    store.begin(0)
    store.save()
    assert PayloadStore(tmp_path).get(0, "k") is None


def test_the_cut_is_4_kib():
    store = PayloadStore(None)
    store.put(0, "small", Payload("send", 4096, "uint8", bytes(4096)))
    store.put(0, "large", Payload("send", 4097, "uint8", bytes(4097)))
    assert store.get(0, "small").data is not None and store.get(0, "large").data is None
    assert store.get(0, "large").bytes == 4097  # still good for noticing a mismatch


@pytest.mark.parametrize("value", [None, True, 1, 2.5, "x", [1, [2]], {"a": {"b": []}}])
def test_plain_objects(value):
    assert json_plain(value) and json.loads(json.dumps(value)) == value


@pytest.mark.parametrize(
    "value", [(1,), {1: 2}, float("nan"), float("inf"), torch.ones(1), object(), {"a": (1,)}, "x" * 4096, {1, 2}]
)
def test_objects_that_json_would_change_are_not_plain(value):
    assert not json_plain(value)
    store = PayloadStore(None)
    store.put(0, "k", Payload("send_object_list", 1, "object", object=[value]))
    assert store.get(0, "k").object is ABSENT


def test_endless_nesting_is_not_plain():
    value: list = []
    value.append(value)
    assert not json_plain(value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"format": 2, "rank": 0, "payloads": {}}',
        '{"format": 1, "rank": 5, "payloads": {}}',
        '{"format": 1, "rank": 0, "payloads": []}',
        '{"format": 1, "rank": 0, "payloads": {"k": 3}}',
        '{"format": 1, "rank": 0, "payloads": {"k": {"kind": "send", "bytes": -1, "dtype": "int8"}}}',
        '{"format": 1, "rank": 0, "payloads": {"k": {"kind": "send", "bytes": 1, "dtype": "int8", "data": "%%"}}}',
        "[" * 100_000,
    ],
)
def test_damaged_files_are_refused_in_one_sentence(tmp_path, text):
    (tmp_path / "00000.json").write_text(text)
    with pytest.raises(UsageError, match=r"00000\.json: not a payload file"):
        PayloadStore(tmp_path)


def test_any_cut_and_any_flipped_byte_are_read_or_refused(tmp_path):
    store = PayloadStore(tmp_path)
    store.put(0, "k", Payload("send", 4, "int32", b"abcd", [1, {"a": "b"}]))
    store.save()
    path = tmp_path / "00000.json"
    whole = path.read_bytes()
    for i in range(len(whole)):
        for damaged in (whole[:i], whole[:i] + bytes([whole[i] ^ 0x15]) + whole[i + 1 :], whole[:i] + b"\xff"):
            path.write_bytes(damaged)
            with contextlib.suppress(UsageError):
                PayloadStore(tmp_path)
