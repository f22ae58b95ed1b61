"""Profiles as dictionaries, under the names of the command line's JSON."""

import json

import numpy as np
import pytest

import cubist

A, B = cubist.spec((512, 1024), "bf16"), cubist.spec((1024, 768), "bf16")


def test_a_profile_without_data():
    p = cubist.npu("ascend910b2").matmul(A, B)
    assert p["kernel"] == "matmul" and p["chip"] == "ascend910b2" and p["policy"] == "minimal"
    assert (
        p["macs"] == 512 * 1024 * 768
        and p["time_us"] > 0
        and p["cycles"] == pytest.approx(p["time_us"] * 1800, rel=1e-6)
    )
    assert {q["path"] for q in p["paths"]} >= {"L1->L0A", "L1->L0B", "L0C->GM"}
    assert sum(c["us"] for c in p["critical_path"]) == pytest.approx(p["time_us"], rel=1e-6)
    assert 0 < p["roofline"]["share"] <= 1 and p["lines"] and p["pipes"] and p["occupancy"]
    json.dumps(p)


def test_devices_differ_by_what_is_set():
    base = cubist.npu("ascend910b2", details=False).matmul(A, B)
    assert "critical_path" not in base
    slow = cubist.npu("ascend910b2", set={"memory.hbm_bytes_per_s": 1e11}, details=False).matmul(A, B)
    assert slow["time_us"] > 1.5 * base["time_us"]
    flags = cubist.npu("ascend910b2", policy="per-tile", details=False).matmul(A, B)
    assert flags["policy"] == "per-tile" and flags["time_us"] >= base["time_us"]
    assert set(cubist.chips()) >= {"ascend910b1", "ascend910b2", "ascend910b3", "ascend910b4"}


def test_with_data_it_computes(rng):
    a, b = rng.standard_normal((20, 30)).astype(np.float32), rng.standard_normal((30, 10)).astype(np.float32)
    out = np.empty((20, 10), np.float32)
    profile = cubist.matmul(a, b, out=out, device=cubist.npu("ascend910b2", with_data=True))
    assert profile["macs"] == 20 * 30 * 10
    np.testing.assert_allclose(out, a.astype(np.float64) @ b, rtol=1e-5, atol=1e-5)
    untouched = np.full((20, 10), 3, np.float32)
    cubist.npu("ascend910b2").matmul(a, b, out=untouched)
    assert np.all(untouched == 3)


def test_shapes_alone_do_not_compute():
    with pytest.raises(ValueError, match="matmul: a"):
        cubist.matmul(A, B)


def test_index_arrays_are_read():
    x, w = cubist.spec((64, 128), "bf16"), cubist.spec((4, 128, 96), "bf16")
    npu = cubist.npu("ascend910b2", details=False)
    uneven = npu.grouped_matmul(x, np.array([60, 1, 1, 2], np.int32), w)
    assert uneven["macs"] == 64 * 128 * 96
    fewer = npu.grouped_matmul(x, np.array([1, 1, 1, 1], np.int32), w)
    assert fewer["macs"] == 4 * 128 * 96


def block_weights(rng):
    return {
        "norm": np.ones(32, np.float32),
        "router": rng.standard_normal((32, 4)).astype(np.float32),
        "gate_up": rng.standard_normal((4, 32, 32)).astype(np.float32),
        "down": rng.standard_normal((4, 16, 32)).astype(np.float32),
    }


def test_a_block_lists_its_kernels(rng):
    w = block_weights(rng)
    p = cubist.npu("ascend910b2", with_data=True).moe_block(
        rng.standard_normal((16, 32)).astype(np.float32), w, 2
    )
    names = [k["name"] for k in p["kernels"]]
    assert len(names) >= 6 and p["time_us"] == pytest.approx(sum(k["time_us"] for k in p["kernels"]))


def test_a_block_without_data_takes_the_routes_of_its_state(rng):
    w = block_weights(rng)
    x = rng.standard_normal((16, 32)).astype(np.float32)
    npu, state = cubist.npu("ascend910b2"), cubist.BlockState()
    with pytest.raises(ValueError, match="state"):
        npu.moe_block(x, w, 2)
    cubist.moe_block(x, w, 2, state=state)
    shapes = {name: cubist.spec(a.shape, "fp32") for name, a in w.items()}
    tokens = cubist.spec(x.shape, "fp32")
    forward = npu.moe_block(tokens, shapes, 2, state=state)
    backward = npu.moe_block_grad(tokens, shapes, 2, tokens, state)
    for p in forward, backward:
        assert p["time_us"] == pytest.approx(sum(k["time_us"] for k in p["kernels"]))
    assert backward["time_us"] > forward["time_us"]


def test_a_timeline_is_written(tmp_path):
    path = tmp_path / "matmul.json"
    cubist.npu("ascend910b2", timeline=path, details=False).matmul(A, B)
    events = json.loads(path.read_text())
    assert len(events["traceEvents"] if isinstance(events, dict) else events) > 100


def test_a_tuning_is_taken(tmp_path):
    path = tmp_path / "tuning.txt"
    path.write_text("matmul ascend910b2 nonsense\n")
    with pytest.raises(ValueError, match="tuning.txt:1|line 1"):
        cubist.npu("ascend910b2", tuning=path)


def test_the_readme_example_runs(capsys):
    import pathlib
    import runpy

    runpy.run_path(str(pathlib.Path(__file__).parents[1] / "examples" / "matmul.py"))
    printed = capsys.readouterr().out
    assert "c(0, 0) = 256.0" in printed and "us on ascend910b2, bound by" in printed
