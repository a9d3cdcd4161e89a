# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What an offline run of Weights & Biases wrote, read without wandb's own reader."""

import json
import struct

from wandb.proto import wandb_internal_pb2


def wandb_records(path):
    """Reads wandb's transaction log: LevelDB's log format behind a header of seven bytes."""
    data, position, record = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while position + 7 <= len(data):
        room = 32768 - position % 32768
        if room < 7:
            position += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def values_of(items):
    """The values of a record's items by key."""
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def parts(path):
    """The parts of a run by kind, each a list in the order of writing."""
    found = {}
    for record in wandb_records(path):
        kind = record.WhichOneof("record_type")
        found.setdefault(kind, []).append(getattr(record, kind))
    return found
