"""The doctor: which modules it asks, what it says of failures, how it exits; and which path the dispatch takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvfactory import doctor
from kvfactory.kernels import dispatch, reference
from kvfactory.kernels.checks import Check, compare, equal

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def on_gpu(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    monkeypatch.setattr(dispatch, "find_spec", lambda package: object())


def test_on_the_cpu_the_definitions_are_checked_and_kernels_said_to_need_cuda(capsys):
    assert doctor.main(["--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "kernels need CUDA" in out and "runs will use torch" in out
    assert "ok      torch segment_decode" in out and "float32" in out and "bfloat16" in out
    assert out.rstrip().endswith("0 failed") and not out.rstrip().endswith("\n0 checks, 0 failed")


def test_a_wrong_definition_fails_the_doctor(monkeypatch, capsys):
    right = reference.segment_decode
    monkeypatch.setattr(reference, "segment_decode", lambda *a, **k: right(*a, **k) * 1.01)
    assert doctor.main(["--device", "cpu"]) == 1
    assert "FAILED  torch segment_decode" in capsys.readouterr().out


def test_a_check_that_crashes_is_a_failure_and_the_others_still_run(monkeypatch, capsys):
    def crash(device, dtype):
        raise RuntimeError("out of resource: shared memory\nmore")

    broken = SimpleNamespace(__name__="kvfactory.kernels.broken", check=crash)
    fine = SimpleNamespace(__name__="kvfactory.kernels.fine", check=lambda *_: [Check("fine", torch.int8, 0, 0)])
    monkeypatch.setattr(doctor, "checked_modules", lambda device: ([broken, fine], []))
    assert doctor.main(["--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "FAILED  kvfactory.kernels.broken float16: RuntimeError: out of resource: shared memory" in out
    assert "ok      fine, float16" in out and "6 checks, 3 failed" in out


def test_on_a_gpu_every_kernel_module_with_a_check_takes_part():
    pytest.importorskip("triton")
    names = [module.__name__.rsplit(".")[-1] for module in doctor.checked_modules(torch.device("cuda"))[0]]
    assert {"append", "decode_attention", "gather", "reference"} <= set(names) and "dispatch" not in names


def test_without_triton_the_kernels_are_named_as_not_checked(monkeypatch):
    def missing(name):
        if name.endswith((".append", ".decode_attention", ".attention_scores")):
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
        return SimpleNamespace(__name__=name, check=None)

    monkeypatch.setattr(doctor.importlib, "import_module", missing)
    absent = doctor.checked_modules(torch.device("cuda"))[1]
    assert any("kvfactory.kernels.append needs triton" in line for line in absent)


@pytest.mark.parametrize("name, said", [("cuda:99", "CUDA devices"), ("meta", "is not cpu"), ("gpu", "is not cpu")])
def test_devices_that_do_not_exist_are_refused(name, said, capsys):
    assert doctor.main(["--device", name]) == 2
    assert said in capsys.readouterr().err


def test_a_wrong_variable_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setenv(dispatch.VARIABLE, "fast")
    assert doctor.main(["--device", "cpu"]) == 2
    assert capsys.readouterr().err == "python -m kvfactory.doctor: KVFACTORY_KERNELS=fast is neither torch nor triton\n"


def test_judgement_allows_twice_the_error_of_plain_torch_and_never_nan():
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    plain = torch.tensor([1.0, 2.01])
    assert compare("", torch.tensor([1.0, 2.019]), plain, exact).passed
    assert not compare("", torch.tensor([1.0, 2.021]), plain, exact).passed
    assert not compare("", torch.tensor([torch.nan, 2.0]), plain, exact).passed
    assert equal("", exact, exact).passed and not equal("", exact, exact + 1).passed


def test_the_path_follows_device_measurement_and_variable(monkeypatch):
    assert "cpu" in dispatch.why_torch("cpu")
    on_gpu(monkeypatch, "NVIDIA H200 141GB")
    assert dispatch.why_torch("cuda") is None and dispatch.use_triton("cuda")
    monkeypatch.setenv(dispatch.VARIABLE, "torch")
    assert dispatch.why_torch("cuda") == "KVFACTORY_KERNELS=torch"
    monkeypatch.delenv(dispatch.VARIABLE)
    on_gpu(monkeypatch, "NVIDIA L4")
    assert "NVIDIA L4" in dispatch.why_torch("cuda") and not dispatch.use_triton("cuda")
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    assert dispatch.use_triton("cuda")
    monkeypatch.setattr(dispatch, "find_spec", lambda package: None)
    with pytest.raises(ValueError, match="KVFACTORY_KERNELS=triton cannot be followed: triton is not installed"):
        dispatch.why_torch("cuda")
    monkeypatch.delenv(dispatch.VARIABLE)
    on_gpu(monkeypatch, "NVIDIA H200")
    monkeypatch.setattr(dispatch, "find_spec", lambda package: None)
    assert dispatch.why_torch("cuda") == "triton is not installed"


def test_packages_are_not_searched_where_no_kernel_runs(monkeypatch):
    """Every layer asks at every step of the loop, and a search goes through the folders of sys.path."""
    on_gpu(monkeypatch, "NVIDIA L4")
    monkeypatch.setattr(dispatch, "find_spec", lambda package: pytest.fail("searched"))
    assert not dispatch.use_triton("cpu") and not dispatch.use_triton("cuda")


@pytest.mark.parametrize("value, said", [("fast", "neither torch nor triton"), ("triton", "need CUDA")])
def test_a_variable_that_cannot_be_followed_is_refused(monkeypatch, value, said):
    monkeypatch.setenv(dispatch.VARIABLE, value)
    monkeypatch.setattr(dispatch, "find_spec", lambda package: object())
    with pytest.raises(ValueError, match=said):
        dispatch.why_torch("cpu")


def test_decode_kernels_of_each_path(monkeypatch):
    on_cpu = dispatch.decode_kernels("cpu")
    assert on_cpu.append_and_attend is reference.append_and_attend
    assert on_cpu.make_workspace(8, 4, 128, capacity=100, device=CPU) is None
    pytest.importorskip("triton")
    on_gpu(monkeypatch, "NVIDIA H200")
    from kvfactory.kernels import append, decode_attention

    kernels = dispatch.decode_kernels("cuda")
    assert kernels.decode_attention is decode_attention.decode_attention
    assert kernels.append_tokens is append.append_tokens


def test_gather_kernel_of_each_path(monkeypatch):
    assert dispatch.gather_kernel("cpu") is reference.gather_kept
    pytest.importorskip("triton")
    on_gpu(monkeypatch, "NVIDIA H200")
    from kvfactory.kernels import gather

    assert dispatch.gather_kernel("cuda") is gather.gather_kept
    monkeypatch.setenv(dispatch.VARIABLE, "torch")
    assert dispatch.gather_kernel("cuda") is reference.gather_kept
