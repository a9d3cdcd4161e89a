# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Options of the whole suite, and garbage collection in its processes."""

import gc
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Tokens that runs of the suite prepare, in their subprocesses too: not in the user's own cache, and
# kept from one run of the suite to the next.
os.environ["XDG_CACHE_HOME"] = str(
    Path(tempfile.gettempdir()) / f"torchtitan_lr-tests-{os.getuid()}"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--full`` (the nightly job) and ``--shuffle``."""
    parser.addoption("--full", action="store_true", help="whole matrices, waits for time limits")
    parser.addoption(
        "--shuffle", type=int, metavar="SEED", help="run files, and the tests in each, in any order"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is marked nightly; shuffle files, and tests within their file."""
    if not config.getoption("--full"):
        for item in items:
            if item.get_closest_marker("nightly"):
                item.add_marker(pytest.mark.skip(reason="nightly: --full runs it"))
    seed = config.getoption("--shuffle")
    if seed is None:
        return
    source = random.Random(seed)
    rank = {path: source.random() for path in sorted({item.path for item in items})}
    source.shuffle(items)
    items.sort(key=lambda item: rank[item.path])


def pytest_collection_finish() -> None:
    """Keep the collector, which many tests call, away from the millions of the imports' objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def frozen_rest() -> Iterator[None]:
    """Keep the collector away from what the tests of a file have left: caches and modules."""
    yield
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    # At its end the interpreter takes apart what is not frozen; some modules complain about a rest.
    gc.unfreeze()
