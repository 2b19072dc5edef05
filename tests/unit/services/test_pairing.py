from __future__ import annotations

from typing import Any

import pytest

from spool.protos import worker_pb2
from spool.services.scheduler.workers.pairing import PairingError, check_pairing


def target(**fields: Any) -> worker_pb2.WorkerDescription:
    known = {"model_id": "m", "dtype": "bfloat16", "vocabulary_size": 100, "tokenizer_digest": b"\xaa" * 32}
    known |= {"quantization": "none", "kv_cache_dtype": "bfloat16"}
    return worker_pb2.WorkerDescription(role=worker_pb2.ROLE_TARGET, **known | fields)


def draft(**fields: Any) -> worker_pb2.WorkerDescription:
    known = {"model_id": "d", "vocabulary_size": 100, "tokenizer_digest": b"\xaa" * 32}
    return worker_pb2.WorkerDescription(role=worker_pb2.ROLE_DRAFT, **known | fields)


def test_what_fits() -> None:
    check_pairing("d", draft(dtype="float32", quantization="int4"), [("t", target())])
    check_pairing("t", target(), [("d", draft()), ("e", draft(tokenizer_digest=b"", vocabulary_size=0))])
    check_pairing("t", target(device="cuda:0"), [("u", target(device="cuda:1"))])
    check_pairing("d", draft(), [("e", draft(vocabulary_size=5))])
    check_pairing("d", draft(tokenizer_digest=b"", vocabulary_size=200), [("t", target())])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"tokenizer_digest": b"\xbb" * 32},
            "draft worker d (d) does not fit target worker t (m): "
            "tokenizer digests differ (bbbbbbbbbbbb and aaaaaaaaaaaa); vocabulary sizes 100 and 100",
        ),
        ({"vocabulary_size": 90}, "draft worker d (d) does not fit target worker t (m): vocabulary sizes 90 and 100"),
        (
            {"tokenizer_digest": b"", "vocabulary_size": 90},
            "draft worker d does not fit target worker t: vocabulary sizes 90 and 100",
        ),
    ],
)
def test_draft_that_does_not_fit_whoever_comes_first(fields: dict[str, Any], message: str) -> None:
    for name, new, other_name, other in (("d", draft(**fields), "t", target()), ("t", target(), "d", draft(**fields))):
        with pytest.raises(PairingError) as caught:
            check_pairing(name, new, [(other_name, other)])
        assert str(caught.value) == message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_id": "n"}, "model_id n and m"),
        ({"dtype": "float32", "vocabulary_size": 7}, "dtype float32 and bfloat16; vocabulary_size 7 and 100"),
        ({"quantization": "int8"}, "quantization int8 and none"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype int8 and bfloat16"),
        ({"tokenizer_digest": b""}, "tokenizer digest none and aaaaaaaaaaaa"),
        ({"exact_row_counts": [4]}, "exact mode on and off"),
    ],
)
def test_targets_that_differ(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PairingError) as caught:
        check_pairing("new", target(**fields), [("t", target())])
    assert str(caught.value) == f"target workers new and t differ: {message}"
