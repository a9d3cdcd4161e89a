# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A run on one machine listens where no other machine can reach it."""

import signal
import sys

import pytest

from tests.integration import runs
from tests.support.sockets import listening

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net/tcp")


def test_one_machine_listens_on_its_loopback_interface_only(tmp_path):
    config = runs.write_config(tmp_path / "dump")
    run = runs.launch(config, hold="dump:step:2")
    ranks = run.wait_for_held(2)
    found = {pid: listening(pid) for pid in (run.pid, *ranks)}
    run.send(signal.SIGKILL)
    run.finish()
    # The store is the launcher's, the ranks have gloo's sockets.
    assert len(found[run.pid]) == 1
    assert all(found[rank] for rank in ranks)
    assert all(address.is_loopback for addresses in found.values() for address in addresses)
