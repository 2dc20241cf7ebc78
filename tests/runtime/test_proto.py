"""The generated code in the repository is that of `peer.proto`, and old enough to load anywhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from flwr_moshpit.runtime import peer_pb2, wire

ROOT = Path(__file__).parents[2]
PROTO = "flwr_moshpit/runtime/peer.proto"


def test_the_generated_code_is_current(tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc")
    out = tmp_path / "peer.binpb"
    status = protoc.main(["protoc", f"-I{ROOT}", f"--descriptor_set_out={out}", str(ROOT / PROTO)])
    assert status == 0
    (current,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    committed = descriptor_pb2.FileDescriptorProto.FromString(peer_pb2.DESCRIPTOR.serialized_pb)
    # protoc fills in JSON names, which the generated code leaves out.
    for message in current.message_type:
        _forget_json_names(message)
    assert committed == current, f"{PROTO} was changed: generate its code as it says"


def _forget_json_names(message: descriptor_pb2.DescriptorProto) -> None:
    for field in message.field:
        field.ClearField("json_name")
    for nested in message.nested_type:
        _forget_json_names(nested)


def test_the_generated_code_loads_on_the_oldest_protobuf_allowed() -> None:
    text = (ROOT / PROTO).with_name("peer_pb2.py").read_text()
    generated = re.search(r"Protobuf Python Version: (\d+)\.(\d+)", text)
    allowed = re.search(r'"protobuf>=(\d+)\.(\d+)', (ROOT / "pyproject.toml").read_text())
    assert generated is not None
    assert allowed is not None
    assert [int(part) for part in generated.groups()] <= [int(part) for part in allowed.groups()]


def test_every_message_of_the_envelope_is_in_the_table() -> None:
    (oneof,) = peer_pb2.Envelope.DESCRIPTOR.oneofs
    assert {field.name for field in oneof.fields} == set(wire.MESSAGES)
    assert 0 < wire.WIRE_VERSION < 128
