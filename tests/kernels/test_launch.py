"""What is kept of a launch: the compiled kernel that Triton itself would find."""

import contextlib
import itertools
import types

import pytest
import torch

start = pytest.importorskip("givens.kernels.gpu.launch")
jit = pytest.importorskip("triton.runtime.jit")
compiler = pytest.importorskip("triton.compiler.compiler")

STREAM = 7


class Kernel:
    """Stands for a Triton kernel: compiles once for each kind of arguments, and tells of calls."""

    arg_names = ("x", "size", "factor", "COUNTED", "WIDE")

    def __init__(self):
        self.fn, self.asked, self.ran = object(), [], []

    def __getitem__(self, size):
        def first(*arguments, **options):
            self.asked.append((size, arguments, options))
            return Compiled(self, len(self.asked))

        return first


class Compiled:
    """Takes what Triton's own gives to `run`."""

    function, packed_metadata = object(), object()

    def __init__(self, kernel, number):
        self.kernel, self.number = kernel, number

    def run(self, x, y, z, stream, function, metadata, told, enter, leave, *arguments):
        assert stream == STREAM
        assert (function, metadata) == (self.function, self.packed_metadata)
        assert told is enter is leave is None
        self.kernel.ran.append((self.number, (x, y, z), arguments))


@pytest.fixture(autouse=True)
def one_stream(monkeypatch):
    active = types.SimpleNamespace(get_current_stream=lambda device: STREAM)
    monkeypatch.setattr(start, "driver", types.SimpleNamespace(active=active))


def launch(kernel, x, size, factor=0.5, cells=(3,), **options):
    options = {"COUNTED": True, "WIDE": 64, "num_warps": 4, **options}
    start.launch(kernel, cells, torch.device("cpu"), x, size, factor, **options)


def test_a_kernel_is_looked_for_once():
    kernel, x = Kernel(), torch.zeros(64)
    launch(kernel, x, 32)
    # What may differ without another kernel: the grid, a float's value, an integer alike.
    launch(kernel, x[4:], 48, 0.25, (5, 2))
    assert len(kernel.asked) == 1
    ((number, cells, (pointer, *others)),) = kernel.ran
    assert (number, cells, others) == (1, (5, 2, 1), [48, 0.25, True, 64])
    assert pointer.data_ptr() == x[4:].data_ptr()


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.zeros(65)[1:]},
        {"x": torch.zeros(64, dtype=torch.float64)},
        {"x": None},
        {"size": 33},
        {"size": 1},
        {"size": 1 << 40},
        {"factor": 2},
        {"COUNTED": False},
        {"WIDE": 128},
        {"num_warps": 8},
    ],
)
def test_what_is_compiled_for_is_looked_for_anew(change):
    kernel, same = Kernel(), {"x": torch.zeros(64), "size": 32}
    launch(kernel, **same)
    launch(kernel, **{**same, **change})
    assert len(kernel.asked) == 2
    launch(kernel, **same)
    launch(kernel, **{**same, **change})
    assert [number for number, *_ in kernel.ran] == [1, 2]


@pytest.mark.parametrize("version", ["3.2.0", "3.10.0", "4.0.0"])
def test_an_unknown_triton_is_called_in_public(monkeypatch, version):
    """Every time, with the same arguments and options; nothing private of it is used."""
    monkeypatch.setattr(start.triton, "__version__", version)
    monkeypatch.setattr(start, "driver", None)
    kernel, x = Kernel(), torch.zeros(64)
    for _ in range(3):
        launch(kernel, x, 32)
    options = {"COUNTED": True, "WIDE": 64, "num_warps": 4}
    assert kernel.asked == 3 * [((3,), (x, 32, 0.5), options)]
    assert kernel.ran == []


def test_which_versions_are_known():
    known = ["3.3.0", "3.4.1", "3.9.0", "3.9.0+git1234"]
    assert [start.is_verified(version) for version in known] == 4 * [True]
    assert not any(map(start.is_verified, ("2.3.1", "3.2.0", "3.10.0", "4.3.0")))
    # With this one the tests of this file have compared them.
    assert start.is_verified(start.triton.__version__)


def test_a_kernel_starts_where_its_arguments_are(monkeypatch):
    current, seen = [0], []

    @contextlib.contextmanager
    def on(device):
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(
        Kernel, "__getitem__", lambda kernel, _: lambda *_, **__: Compiled(kernel, 1)
    )
    monkeypatch.setattr(Compiled, "run", lambda *_: seen.append(current[0]))
    kernel = Kernel()
    for device in ("cuda:1", "cuda:0", "cuda:1", "cuda:0", "cuda:1"):
        start.launch(kernel, (3,), torch.device(device), 7, 0.5, 1, COUNTED=True, WIDE=64)
    assert (seen, current) == ([1, 0, 1], [0])


def test_kinds_are_those_of_triton():
    """Two arguments of one kind have one specialisation there."""
    x = torch.zeros(64)
    arguments = [
        x,
        x[1:],
        x[4:],
        x.double(),
        0,
        1,
        2,
        15,
        16,
        32,
        2**31 - 1,
        2**31,
        2**40,
        0.5,
        7.0,
    ]
    arguments += [None, 2**31 - 16, 2**31 + 16]
    for pair in itertools.combinations(arguments, 2):
        if start._kind(pair[0]) == start._kind(pair[1]):
            told = [jit.native_specialize_impl(jit.BaseBackend, a, False, True, True) for a in pair]
            assert told[0] == told[1], pair


def test_a_kernel_is_run_as_triton_runs_it():
    """Its own runner gives `run` the same, but for a profiler's hooks."""
    given = []
    compiled = compiler.CompiledKernel.__new__(compiler.CompiledKernel)
    vars(compiled).update(
        _run=lambda *all_: given.append(all_),
        _init_handles=lambda: None,
        launch_metadata=lambda *_: None,
        function=1,
        packed_metadata=2,
        module=None,
    )
    compiled[(3, 4, 5)](0.5, 64, stream=STREAM)
    ((*first, _told, _enter, _leave, x, size),) = given
    assert (first, x, size) == ([3, 4, 5, STREAM, 1, 2], 0.5, 64)
