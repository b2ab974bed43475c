"""The bindings of programs: wrong arguments raise and never crash, one run at a time, cancel."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from llamay.errors import CancelledError
from llamay.formats import Format
from llamay.mlx_kernels import Control, _cpu
from llamay.mlx_kernels.reference import ReferenceKernels
from llamay.model.decoder import Rows
from tests.model.running import (
    cpu_kernels,
    extend,
    load_tiny,
    new_cache,
    plain,
    same_bits,
    tokens,
)
from tests.tiny_models import TinyConfig

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, FFN = 32, 2, 1, 16, 20, 48
PAGE_TOKENS, PAGES = 16, 2
LAYOUT = (1, KV_HEADS, HEAD_DIM, PAGE_TOKENS, "f32")
PAGE_BYTES = KV_HEADS * 2 * PAGE_TOKENS * HEAD_DIM * 4
SHAPE = ("scalar", HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, False)
NORM = np.ones(HIDDEN, np.float32)


def matrix(rows, columns):
    values = np.random.default_rng(rows).normal(size=(rows, columns)).astype(np.float32)
    packed = bytearray(_cpu.packed_bytes(0, rows, columns))
    _cpu.pack(0, rows, columns, values, packed)
    return (0, rows, columns, packed)


def new_program(*, shape=SHAPE, inverse=None, magnitudes=(1.0,), scale=0.25):
    inverse = np.ones(HEAD_DIM // 2 * len(magnitudes)) if inverse is None else inverse
    return _cpu.Program(*shape, inverse, np.array(magnitudes, np.float64), scale)


def attention_input(**changes):
    arguments = {
        "layer": 0,
        "norm": NORM,
        "eps": 1e-5,
        "query": matrix(HEADS * HEAD_DIM, HIDDEN),
        "key": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
        "value": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
        "query_bias": None,
        "key_bias": None,
        "value_bias": None,
        "query_norm": None,
        "key_norm": None,
        "rope": 0,
    }
    return tuple((arguments | changes).values())


def complete(program):
    program.add_embed(matrix(VOCAB, HIDDEN), 1.0)
    program.add_attention_input(*attention_input())
    program.add_attention(0, 0, 0.0)
    program.add_attention_output(matrix(HIDDEN, HEADS * HEAD_DIM), None, 0.0)
    program.add_feed_forward(*feed_forward())
    program.add_logits(NORM, 1e-5, matrix(VOCAB, HIDDEN), 0.0)
    return program


def feed_forward(**changes):
    arguments = {
        "norm": NORM,
        "eps": 1e-5,
        "gate": matrix(FFN, HIDDEN),
        "up": matrix(FFN, HIDDEN),
        "down": matrix(HIDDEN, FFN),
        "activation": "silu",
        "post_norm": None,
        "post_eps": 0.0,
    }
    return tuple((arguments | changes).values())


def int32(*values):
    return np.array(values, dtype=np.int32)


def arguments(**changes):
    """What `run` takes, for two rows of one context on two pages."""
    step = {
        "pool": _cpu.Pool(1),
        "tokens": int32(3, 4),
        "positions": int32(15, 16),
        "contexts": int32(0, 0),
        "writes": np.ones(2, np.bool_),
        "page_table": int32(0, 1),
        "max_pages": 2,
        "layout": LAYOUT,
        "slabs": [np.zeros(PAGES * PAGE_BYTES, np.uint8)],
        "pages_per_slab": PAGES,
        "logit_rows": int32(1),
        "logits": np.zeros((1, VOCAB), np.float32),
        "control": np.zeros(2, np.int64),
    }
    assert changes.keys() <= step.keys()
    return SimpleNamespace(**(step | changes))


def run(program, step):
    return program.run(*vars(step).values())


def read_only(array):
    array.flags.writeable = False
    return array


BAD_STEPS = [
    {"pool": object()},
    {"tokens": int32(-1, 0)},
    {"tokens": int32(0, VOCAB)},
    {"tokens": int32()},
    {"tokens": int32(0)},
    {"tokens": "ab"},
    {"tokens": None},
    {"positions": int32(0, -1)},
    {"positions": int32(0, PAGES * PAGE_TOKENS)},
    {"positions": int32(0, 2**31 - 1)},
    {"positions": int32(0, 1, 2)},
    {"contexts": int32(0, 1)},
    {"contexts": int32(0, -1)},
    {"contexts": int32(0)},
    {"writes": np.ones(1, np.bool_)},
    {"page_table": int32(0, -1)},
    {"page_table": int32(0, PAGES)},
    {"page_table": int32(0, 2**31 - 1)},
    {"page_table": int32(0, 1, 0)},
    {"page_table": int32()},
    {"max_pages": 0},
    {"max_pages": -2},
    {"max_pages": 2**62},
    {"slabs": []},
    {"slabs": None},
    {"slabs": [b"\0" * (PAGES * PAGE_BYTES)]},
    {"slabs": [bytearray()]},
    {"slabs": [np.zeros(PAGES * PAGE_BYTES - 1, np.uint8)]},
    {"slabs": [np.zeros(2 * PAGES * PAGE_BYTES, np.uint8)[::2]]},
    {"pages_per_slab": 0},
    {"pages_per_slab": -1},
    {"layout": None},
    {"layout": LAYOUT[:4]},
    {"layout": (0, KV_HEADS, HEAD_DIM, PAGE_TOKENS, "f32")},
    {"layout": (1, KV_HEADS + 1, HEAD_DIM, PAGE_TOKENS, "f32")},
    {"layout": (1, KV_HEADS, HEAD_DIM + 16, PAGE_TOKENS, "f32")},
    {"layout": (1, KV_HEADS, HEAD_DIM, 0, "f32")},
    {"layout": (1, KV_HEADS, HEAD_DIM, -16, "f32")},
    {"layout": (1, KV_HEADS, HEAD_DIM, 8, "f32")},
    {"layout": (1, KV_HEADS, HEAD_DIM, 2**30, "f32")},
    {"layout": (2**31 - 1, KV_HEADS, HEAD_DIM, PAGE_TOKENS, "f32")},
    {"layout": (1, KV_HEADS, HEAD_DIM, PAGE_TOKENS, "q4")},
    {"logit_rows": int32(2)},
    {"logit_rows": int32(-1)},
    {"logit_rows": int32(0, 1)},
    {"logits": np.zeros(VOCAB - 1, np.float32)},
    {"logits": read_only(np.zeros((1, VOCAB), np.float32))},
    {"control": np.zeros(1, np.int64)},
    {"control": read_only(np.zeros(2, np.int64))},
]


@pytest.mark.parametrize("changes", BAD_STEPS, ids=lambda changes: ",".join(changes))
def test_wrong_steps_raise_and_leave_the_program_usable(changes):
    program = complete(new_program())
    good = arguments()
    assert run(program, good)
    with pytest.raises((TypeError, ValueError, BufferError, OverflowError)):
        run(program, arguments(**changes))
    again = arguments()
    assert run(program, again)
    assert np.any(good.logits)
    assert same_bits(good.logits, again.logits)


@pytest.mark.parametrize(
    "shape",
    [
        ("sse", HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, False),
        ("scalar", 0, HEADS, KV_HEADS, HEAD_DIM, VOCAB, False),
        ("scalar", HIDDEN, 0, KV_HEADS, HEAD_DIM, VOCAB, False),
        ("scalar", HIDDEN, HEADS, 0, HEAD_DIM, VOCAB, False),
        ("scalar", HIDDEN, 3, 2, HEAD_DIM, VOCAB, False),
        ("scalar", HIDDEN, HEADS, KV_HEADS, 24, VOCAB, False),
        ("scalar", HIDDEN, 2**20, 2**20, 2**20, VOCAB, False),
        ("scalar", HIDDEN, HEADS, KV_HEADS, -16, VOCAB, False),
        ("scalar", HIDDEN, HEADS, KV_HEADS, HEAD_DIM, 0, False),
        ("scalar", 2**31 - 1, HEADS, KV_HEADS, HEAD_DIM, VOCAB, False),
    ],
)
def test_wrong_shapes_raise(shape):
    with pytest.raises(ValueError, match=r"out of range|does not run"):
        new_program(shape=shape)


def test_more_rotated_dimensions_than_a_head_has_raise():
    with pytest.raises(ValueError, match="rope size"):
        new_program(inverse=np.ones(HEAD_DIM // 2 + 1))


@pytest.mark.parametrize("magnitudes", [(), (1.0, 1.0)])
def test_ropes_that_do_not_share_out_the_frequencies_raise(magnitudes):
    with pytest.raises(ValueError, match="rope size"):
        new_program(inverse=np.ones(HEAD_DIM // 2 + 1), magnitudes=magnitudes)


SHORT = (0, VOCAB, HIDDEN, bytearray(10))


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("add_embed", (None, 1.0)),
        ("add_embed", (matrix(VOCAB, HIDDEN), None)),
        ("add_embed", (matrix(VOCAB + 1, HIDDEN), 1.0)),
        ("add_embed", (matrix(VOCAB, HIDDEN + 1), 1.0)),
        ("add_embed", (SHORT, 1.0)),
        ("add_embed", ((14, VOCAB, HIDDEN, bytearray(2**20)), 1.0)),
        ("add_embed", ((2, VOCAB, 33, bytearray(2**20)), 1.0)),
        ("add_embed", ((0, -1, HIDDEN, bytearray(2**20)), 1.0)),
        ("add_attention_input", attention_input(layer=-1)),
        ("add_attention_input", attention_input(layer=2**31 - 1)),
        ("add_attention_input", attention_input(layer=2**40)),
        ("add_attention_input", attention_input(norm=None)),
        ("add_attention_input", attention_input(norm=NORM[:-1])),
        ("add_attention_input", attention_input(key=matrix(HEADS * HEAD_DIM, HIDDEN))),
        ("add_attention_input", attention_input(value_bias=NORM)),
        ("add_attention_input", attention_input(query_norm=NORM)),
        ("add_attention_input", attention_input(key_norm=NORM)),
        ("add_attention_input", attention_input(rope=-1)),
        ("add_attention_input", attention_input(rope=1)),
        ("add_attention", (-1, 0, 0.0)),
        ("add_attention", (2**31 - 1, 0, 0.0)),
        ("add_attention", (0, -1, 0.0)),
        ("add_attention", (0, 2**31, 0.0)),
        ("add_attention", (0, 0, -1.0)),
        ("add_attention", (0, 0, float("nan"))),
        ("add_attention", (0, 0, float("inf"))),
        ("add_attention_output", (matrix(HIDDEN, HIDDEN + 16), None, 0.0)),
        ("add_attention_output", (matrix(HIDDEN, HIDDEN), NORM[1:], 0.0)),
        ("add_feed_forward", feed_forward(down=matrix(FFN, HIDDEN))),
        ("add_feed_forward", feed_forward(up=matrix(16, HIDDEN))),
        ("add_feed_forward", feed_forward(activation="relu")),
        ("add_feed_forward", feed_forward(post_norm=NORM[1:])),
        ("add_logits", (None, 1e-5, matrix(VOCAB, HIDDEN), 0.0)),
        ("add_logits", (NORM, 1e-5, matrix(VOCAB - 1, HIDDEN), 0.0)),
        ("add_logits", (NORM, 1e-5, matrix(VOCAB, HIDDEN), -1.0)),
    ],
)
def test_wrong_operations_raise_and_are_not_added(method, given):
    program = complete(new_program())
    with pytest.raises((TypeError, ValueError, OverflowError)):
        getattr(program, method)(*given)
    step = arguments()
    assert run(program, step)
    assert step.control[1] == 6


def test_operations_that_are_refused_hold_nothing_and_fill_nothing():
    program = complete(new_program())
    gate = matrix(FFN, HIDDEN)
    for _ in range(200):
        with pytest.raises(ValueError, match="is needed"):
            program.add_feed_forward(*feed_forward(gate=gate, up=gate, down=gate))
    program.add_attention(0, 0, 0.0)
    gate[3].append(0)  # raises while somebody holds the buffer
    step = arguments()
    assert run(program, step)
    assert step.control[1] == 7


def test_an_operation_wider_than_those_that_ran_before_finds_room():
    program = new_program()
    program.add_embed(matrix(VOCAB, HIDDEN), 1.0)
    assert run(program, arguments())
    wide = 64 * FFN
    gate, up, down = matrix(wide, HIDDEN), matrix(wide, HIDDEN), matrix(HIDDEN, wide)
    program.add_feed_forward(*feed_forward(gate=gate, up=up, down=down))
    program.add_logits(NORM, 1e-5, matrix(VOCAB, HIDDEN), 0.0)
    step = arguments()
    assert run(program, step)
    assert np.isfinite(step.logits).all()


@pytest.mark.parametrize("threads", [0, -1, 1025, 2**40])
def test_impossible_numbers_of_threads_raise(threads):
    with pytest.raises((ValueError, OverflowError)):
        _cpu.Pool(threads)


# --- long steps: 600 rows, 8 layers, on the slowest set --------------------


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    config = TinyConfig(layers=8)
    return load_tiny(tmp_path_factory.mktemp("slow"), config, Format.Q4_1, cpu_kernels("scalar", 1))


def wait_for_operations(control, count):
    for _ in range(100_000):
        if control.operations_done >= count:
            return
        threading.Event().wait(0.0002)
    pytest.fail("the step made no progress")


def in_background(function):
    """Starts it; the result of calling what is returned is what it returned, or raises that."""
    outcome = {}

    def target():
        try:
            outcome["value"] = function()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=target)
    thread.start()

    def result():
        thread.join(60)
        if "error" in outcome:
            raise outcome["error"]
        return outcome["value"]

    return result


def test_cancelling_a_running_step_leaves_the_context_as_it_was(slow):
    cache, ids = new_cache(slow), tokens(600, seed=80)
    context = cache.new_context()
    extend(slow, cache, context, ids[:70])
    pages, live = list(context.page_ids), cache.live_pages
    control = Control()
    result = in_background(lambda: slow.forward(cache, [Rows(context, ids[70:])], control))
    wait_for_operations(control, 2)
    control.cancel()
    with pytest.raises(CancelledError):
        result()
    assert 2 <= control.operations_done < slow.num_operations
    assert (context.length, list(context.tokens)) == (70, ids[:70])
    assert (list(context.page_ids), cache.live_pages) == (pages, live)
    cache.check()
    continued = extend(slow, cache, context, ids[70:80])
    assert same_bits(continued, plain(slow, ids[:80])[70:])


def test_a_cancelled_control_stops_every_later_step(slow):
    control = Control()
    control.cancel()
    cache = new_cache(slow)
    context = cache.new_context()
    with pytest.raises(CancelledError):
        slow.forward(cache, [Rows(context, [1, 2, 3])], control)
    assert (context.length, cache.live_pages, control.operations_done) == (0, 0, 0)


def test_the_reference_kernels_are_cancelled_too(tmp_path):
    decoder = load_tiny(tmp_path, TinyConfig(), Format.F32, ReferenceKernels())
    control = Control()
    control.cancel()
    cache = new_cache(decoder)
    with pytest.raises(CancelledError):
        decoder.forward(cache, [Rows(cache.new_context(), [1, 2])], control)
    assert cache.live_pages == 0


def test_progress_counts_up_to_the_number_of_operations(slow):
    control, seen = Control(), []
    cache, ids = new_cache(slow), tokens(600, seed=81)
    result = in_background(lambda: slow.forward(cache, [Rows(cache.new_context(), ids)], control))
    for done in range(1, slow.num_operations + 1):
        wait_for_operations(control, done)
        seen.append(control.operations_done)
    result()
    assert seen == sorted(seen)
    assert len(set(seen)) > 3
    assert control.operations_done == slow.num_operations == 2 + 4 * 8


def test_one_run_at_a_time_for_a_program_and_for_its_threads(slow, tmp_path):
    other = load_tiny(tmp_path, TinyConfig(), Format.F32, slow.kernels)
    cache, ids, control = new_cache(slow), tokens(600, seed=82), Control()
    wanted = plain(slow, ids)
    rows = [Rows(cache.new_context(), ids, len(ids))]
    result = in_background(lambda: slow.forward(cache, rows, control))
    wait_for_operations(control, 2)
    with pytest.raises(RuntimeError, match="already running"):
        plain(slow, [1, 2, 3])
    with pytest.raises(RuntimeError, match="already running"):
        plain(other, [1, 2, 3])
    assert control.operations_done < slow.num_operations, "the step ended before it was disturbed"
    assert same_bits(result(), wanted)
    assert plain(other, [1, 2, 3]).shape == (3, 271)
