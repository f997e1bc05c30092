# SPDX-License-Identifier: Apache-2.0
"""The experiments' command lines, and what they say of times below noise."""

import ast
import importlib
import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import jboost

FOLDER = Path(__file__).parents[1] / "experiments"
PARTS = (
    "benchmark_cases", "benchmark_new", "benchmark_peers", "benchmark_report",
    "benchmark_timing", "benchmark_worker", "compare_fits", "compare_report",
    "compare_tables", "experiment_tools", "gpu_cases", "gpu_parts", "gpu_peers",
    "gpu_report", "gpu_timing", "gpu_user",
)  # fmt: skip
SMALL = dict(
    max_bins=16, linear_leaves=False, init_score=0.0, curvature="exact",
    leaf_solver="newton",
)  # fmt: skip
SCRIPTS = sorted(p.stem for p in FOLDER.glob("*.py") if p.stem not in PARTS)


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    """Scripts find each other, and no test finds them afterwards."""
    monkeypatch.syspath_prepend(FOLDER)
    before = {*sys.modules}
    yield
    for name in {*sys.modules} - before:
        if (FOLDER / f"{name}.py").exists():
            del sys.modules[name]


def run(monkeypatch, script, *arguments):
    """Calls the script's main function; returns the exit status."""
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(script).main()
    return ended.value.code


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_says_what_the_script_does_and_where_it_writes(
    script, monkeypatch, capsys
):
    assert run(monkeypatch, script, "--help") == 0
    said = capsys.readouterr().out
    docstring = ast.get_docstring(ast.parse((FOLDER / f"{script}.py").read_text()))
    assert docstring is not None and docstring.splitlines()[0] in said
    assert "--out DIR" in said
    assert not any(word in said for word in ("--output", "--results", "--json"))


def test_documentation_lists_every_script():
    page = (FOLDER.parent / "docs/experiments.md").read_text()
    assert [name for name in SCRIPTS if f"- `{name}.py`" not in page] == []


def test_scripts_use_the_public_package_only():
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            inner = {name for name in names if name.startswith("jboost.")}
            public = {"jboost.dask", "jboost.ray"}
            if path.name in ("gpu_programs.py", "gpu_user.py"):
                # They choose kernels that cannot run here, and how programs compile.
                public |= {"jboost.entry.context", "jboost.entry.programs"}
                public |= {"jboost.training.chunks"}
            assert inner <= public, path.name


def test_unknown_tables_are_answered_with_the_known_ones(monkeypatch, capsys, tmp_path):
    script = "compare_libraries"
    table = tmp_path / "abalone" / "meta.json"
    table.parent.mkdir()
    table.touch()
    arguments = ["--tables", tmp_path, "--out", tmp_path]
    assert run(monkeypatch, script, *arguments, "--only", "nosuch") == 2
    said = capsys.readouterr().err
    assert "abalone" in said and "nosuch" in said and "adult" not in said
    assert run(monkeypatch, script, "--tables", tmp_path / "empty") == 2
    assert "abalone" in capsys.readouterr().err


def write_abalone(folder):
    """Writes 150 generated rows with the columns of a table of compare_libraries."""
    rng = np.random.default_rng(0)
    size = rng.uniform(size=150)
    frame = pd.DataFrame({"sex": rng.choice(["M", "F", "I"], 150), "size": size})
    frame["weight"] = rng.normal(size=150)
    frame["rings"] = rng.poisson(5 + 10 * size) + 1
    (folder / "abalone").mkdir()
    meta = {"target": "rings", "drop_columns": []}
    (folder / "abalone" / "meta.json").write_text(json.dumps(meta))
    frame.to_parquet(folder / "abalone" / "data.parquet")
    return frame


def test_libraries_are_compared_and_a_killed_run_loses_one_fit(
    tmp_path, monkeypatch, capsys
):
    write_abalone(tmp_path)
    compare = importlib.import_module("compare_libraries")
    tasks = ["squared_error", "categories"]
    command = ["compare_libraries.py", "--tables", tmp_path, "--out", tmp_path / "out"]
    command += ["--task", *tasks, "--splits", "2", "--threads", "1", "--depths", "2"]
    command += ["--libraries", "jboost", "xgboost", "lightgbm", "sklearn"]
    command += ["--rounds", "6", "12"]
    monkeypatch.setattr(sys, "argv", [*map(str, command)])
    compare.main()
    said = capsys.readouterr().out
    assert "Found: " in said and "FAILED" not in said
    result = json.loads((tmp_path / "out/compare_libraries.json").read_text())
    assert result["failed"] == []
    reports = {(r["task"], r["rounds"]): r for r in result["reports"]}
    assert {*reports} == {(task, rounds) for task in tasks for rounds in (6, 12)}
    assert len(reports["categories", 6]["libraries"]) == 5
    assert reports["categories", 6]["codes"]["native / codes"] > 0
    assert "<svg" in (tmp_path / "out/compare_libraries.svg").read_text()

    # A broken last line costs one fit; fewer rounds are read off the same curves.
    cache = tmp_path / "out/compare_libraries.jsonl"
    cache.write_text(cache.read_text()[:-9])
    measured = []
    measure = compare.measure
    monkeypatch.setattr(
        compare, "measure", lambda *a: measured.append(a) or measure(*a)
    )
    sys.argv[-1:] = ["12"]
    compare.main()
    assert len(measured) == 1
    again = json.loads((tmp_path / "out/compare_libraries.json").read_text())
    names = ["early", "last", "best", "early/best", "last/mean", "early rank"]
    for old, new in zip(result["reports"], again["reports"], strict=True):
        for before, after in zip(old["tables"], new["tables"], strict=True):
            assert [before.get(n) for n in names] == [after.get(n) for n in names]

    def fail(library, *others):
        raise RuntimeError(f"{library} is broken")

    monkeypatch.setattr(compare, "measure", fail)
    sys.argv += ["--depths", "1"]
    with pytest.raises(SystemExit, match="every fit failed"):
        compare.main()
    sys.argv[-1:] = ["1", "2"]
    compare.main()  # failures of one depth do not end the other
    assert "FAILED: 16 fits" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [
    "--set l2", "--set nosuch=1", "--set max_depth=3", "--rounds 101", "--rates 0",
    "--splits 0", "--depths x", "--half report", "--half nosuch",
])  # fmt: skip
def test_options_of_compare_libraries_are_checked(wrong, monkeypatch, capsys, tmp_path):
    wrong = wrong.split()
    write_abalone(tmp_path)
    arguments = ["--tables", tmp_path, "--out", tmp_path, *wrong]
    assert run(monkeypatch, "compare_libraries", *arguments) == 2
    assert wrong[0] in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["softmax", "poisson", "huber"])
def test_curves_are_losses_of_whole_models(kind, tmp_path):
    """Increments of scores, summed up, are the scores that a library predicts."""
    import lightgbm
    import xgboost

    fits = importlib.import_module("compare_fits")
    tables = importlib.import_module("compare_tables")
    write_abalone(tmp_path)
    table = "abalone ages" if kind == "softmax" else "abalone"
    parts = tables.split_table(tables.Case("", kind, table), tmp_path, 0)
    train, _, test = parts
    settings = fits.Settings(rounds=9, threads=1, depth=3)

    def read(library):
        curves = fits.measure(library, kind, parts, settings)
        assert len(curves["test"]) == len(curves["validation"]) == 9
        parameters = fits.list_parameters(library, kind, settings)
        if kind == "softmax":
            parameters["num_scores" if library == "jboost" else "num_class"] = 3
        return curves["test"][-1], parameters

    def check(found, score):
        expected = fits.held_out_loss(kind, score, test.target)
        np.testing.assert_allclose(found, expected, rtol=1e-5)  # scores are float32

    found, parameters = read("xgboost")
    start = [
        fits.start_score(kind, train, rows) if kind == "huber" else None
        for rows in (train, test)
    ]
    data = xgboost.DMatrix(train.x, train.target, base_margin=start[0])
    model = xgboost.train({**parameters, "nthread": 1}, data, 9)
    data = xgboost.DMatrix(test.x, base_margin=start[1])
    check(found, model.predict(data, output_margin=True))

    found, parameters = read("lightgbm")
    data = lightgbm.Dataset(train.x, train.target)
    model = lightgbm.train({**parameters, "num_threads": 1}, data, 9)
    check(found, model.predict(test.x, raw_score=True))

    found, parameters = read("jboost")
    loss = getattr(jboost.losses, kind)
    model, _ = jboost.fit(train.x, train.target, loss, num_rounds=9, **parameters)
    check(found, np.asarray(jboost.predict(model, test.x)))


def test_held_out_losses_are_half_the_deviances():
    from sklearn import metrics

    fits = importlib.import_module("compare_fits")
    rng = np.random.default_rng(0)
    score, target = rng.normal(size=50), rng.poisson(2, 50).astype(np.float32)
    for kind, power, y in (
        ("poisson", 1, target), ("tweedie", 1.5, target), ("gamma", 2, target + 1),
    ):  # fmt: skip
        expected = metrics.mean_tweedie_deviance(y, np.exp(score), power=power) / 2
        assert fits.held_out_loss(kind, score, y) == pytest.approx(expected)


def test_tables_are_split_by_a_fixed_rule(tmp_path):
    tables = importlib.import_module("compare_tables")
    frame = write_abalone(tmp_path)
    case = tables.Case("logistic", "logistic", "abalone old")
    parts = tables.split_table(case, tmp_path, 0)
    assert [len(part.x) for part in parts] == [96, 24, 30]
    assert sum(part.target.sum() for part in parts) == (frame["rings"] >= 15).sum()
    assert all(part.x.shape[1] == 3 and part.categorical == () for part in parts)
    sizes = np.concatenate([part.x[:, 1] for part in parts])
    np.testing.assert_array_equal(np.sort(sizes), np.sort(frame["size"].astype("f4")))
    (few, *_) = tables.split_table(case._replace(task="categories"), tmp_path, 0, 50)
    assert len(few.x) == 32 and few.categorical == (0,)
    for task in tables.TASKS:
        halves = {"choose": set(), "report": set()}
        for case in tables.list_cases([task]):
            halves[tables.find_half(case.folder)].add(case.folder)
        assert all(halves.values()), task


def test_other_tables_list_their_tasks(tmp_path, monkeypatch, capsys):
    tables = importlib.import_module("compare_tables")
    write_abalone(tmp_path)
    (tmp_path / "abalone").rename(tmp_path / "mine")
    path = tmp_path / "mine" / "meta.json"
    meta = json.loads(path.read_text())
    tasks = {"quantile": ["quantile 0.9"], "squared_error": ["squared_error"]}
    path.write_text(json.dumps(meta | {"tasks": tasks}))
    found = tables.find_cases(tmp_path, [*tables.TASKS])
    assert found == [
        tables.Case("squared_error", "squared_error", "mine"),
        tables.Case("quantile", "quantile 0.9", "mine"),
    ]
    assert tables.find_cases(tmp_path, ["gamma", "quantile"]) == found[1:]
    assert len(tables.split_table(found[0], tmp_path, 0)[0].x) == 96
    path.write_text(json.dumps(meta | {"tasks": {"gamma": ["logistic"]}}))
    arguments = ["--tables", tmp_path, "--out", tmp_path]
    assert run(monkeypatch, "compare_libraries", *arguments) == 2
    assert "task='gamma', kind='logistic'" in capsys.readouterr().err


def test_ratios_and_ranks_of_three_libraries():
    """On losses whose ratios can be seen: jboost 2, 6; xgboost 4, 4; lightgbm 3, 12."""
    report = importlib.import_module("compare_report")
    curves = {"jboost": (2, 6), "xgboost": (4, 4), "lightgbm": (3, 12)}
    rows = []
    for library, losses in curves.items():
        for table, loss in zip("ab", losses, strict=True):
            for split in (0, 1):  # the best round is the third, the picked one the 2nd
                test = loss * np.array([3, 1, 0.5, 2])
                fit = {"validation": [4, 1, 2, 3], "test": [*test], "constant": 9.0}
                judged = report.judge(fit, 4)
                assert judged == {"early": loss, "last": 2 * loss, "best": loss / 2}
                assert report.judge(fit, 1)["best"] == 3 * loss
                rows.append(dict(kind="k", table=table, split=split, library=library,
                                 seconds=1.0, **judged))  # fmt: skip
    tables = report.find_ratios(pd.DataFrame(rows))
    summary = report.summarize(tables).loc["jboost"]
    assert summary["early/best"] == pytest.approx(np.sqrt(2 / 3 * 6 / 4))
    assert summary["last/mean"] == pytest.approx(np.sqrt(2 / 3.5 * 6 / 8))
    assert (summary["worst"], summary["worst table"]) == (1.5, "b, k")
    assert summary["rank early"] == 1.5 and summary["tables"] == 2
    assert (tables["+-"] == 0).all()
    clean = {"validation": [1.0], "test": [1e-9], "constant": 2.0}
    assert report.judge(clean, 1)["early"] == pytest.approx(0.002)


def test_slopes_above_noise_are_positive_in_every_turn():
    """Whatever the readings are, and slopes far above their spread are found."""
    from experiment_tools import find_slope

    rng = np.random.default_rng(0)
    found = 0
    for tree in (0.0, 0.01, 1.0):
        for _ in range(200):
            few = 5 + 0.05 * rng.random(4)
            many = 5 + 10 * tree + 0.05 * rng.random(4)
            slope = find_slope(few, many, 10)
            assert slope.value == pytest.approx((np.median(many) - np.median(few)) / 10)
            if slope.measured is None:
                assert tree < 1
            else:
                assert tree > 0 and np.subtract.outer(many, few).min() > 0
                found += 1
    assert found > 200


def test_shared_trees_are_compared_and_kept(tmp_path, monkeypatch, capsys):
    """Fits that are kept are not repeated; tables of several runs are put together."""
    import xgboost

    script = importlib.import_module("shared_trees")
    monkeypatch.setattr(script, "DEPTH", 2)
    monkeypatch.setattr(jboost, "fit", partial(jboost.fit, **SMALL))
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(200, 4)), columns=[*"abcd"])
    frame["kind"] = np.where(frame["a"] > 0, "x", np.where(frame["b"] > 0, "y", "z"))
    frame.to_csv(tmp_path / "table.csv", index=False)
    command = ["shared_trees.py", "--data", tmp_path / "table.csv", "--rounds", "5"]
    command += ["--out", tmp_path, "--target"]
    for targets in (["kind"], ["a", "c"]):
        monkeypatch.setattr(sys, "argv", [*map(str, command), *targets])
        with xgboost.config_context(nthread=1):
            script.main()
    assert "over 2 tables" in capsys.readouterr().out
    monkeypatch.setattr(script, "measure", None)
    script.main()
    result = json.loads((tmp_path / "shared_trees.json").read_text())
    classes, several = result["tables"]
    assert classes["fits"][script.SHARED]["scores"] == 3
    assert several["fits"][script.SHARED]["scores"] == 2
    ratios = [row["ratios"][script.OWN]["loss"] for row in result["tables"]]
    mean = result["means"][script.OWN]["loss"]
    assert mean == pytest.approx(np.sqrt(ratios[0] * ratios[1]))
    assert (tmp_path / "shared_trees.png").stat().st_size > 0
    sys.argv[-2:] = ["nosuch"]
    with pytest.raises(SystemExit, match="'nosuch'"):
        script.main()


def test_losses_of_shared_trees_are_scikit_learns():
    from sklearn import metrics

    script = importlib.import_module("shared_trees")
    rng = np.random.default_rng(0)
    scores, kinds = rng.normal(size=(50, 4)), rng.integers(0, 4, 50)
    chances = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    expected = metrics.log_loss(kinds, chances, labels=range(4))
    assert script.held_out_loss(scores, kinds) == pytest.approx(expected)


def make_entry(**values):
    """One step of a benchmark as it is written: a reading of each source."""
    sources = {
        name: dict(medians={"time": value} if value else {}, discarded=0, note="",
                   readings=[{"time": value}] if value else [])
        for name, value in values.items()
    }  # fmt: skip
    return dict(seconds=1.0, sources=sources, losses={})


def test_benchmark_compares_with_the_fastest_peer(tmp_path, capsys):
    report = importlib.import_module("benchmark_report")
    plan = {step.name: step for step in report.PLAN}
    assert len(plan) == len(report.PLAN)
    for step in report.PLAN:
        known = {*importlib.import_module("benchmark_cases").PEERS}
        assert {line.subject for line in step.lines} <= {*step.sources} - known
        assert all((line.over or known & {*step.sources}) for line in step.lines)
        assert all(line.group in report.GROUPS for line in step.lines)
    ratios = report.find_ratios({"steps": {}})
    assert len({row["label"] for row in ratios}) == len(ratios)

    def find(**values):
        own = {name.replace("_", "-"): value for name, value in values.items()}
        entry = make_entry(**own)
        step = plan["train large"]._replace(sources=tuple(own))
        row = report.find_ratio(entry, step, step.lines[0])
        return row["measured"], row["over"].split(",")[0], row["verdict"]

    assert find(jboost=2, xgboost=8, lightgbm=4) == (0.5, "lightgbm", "MISSED")
    assert find(jboost=2, xgboost=5, lightgbm_q=10) == (0.4, "xgboost", "reached")
    assert find(jboost=1, xgboost=5) == (0.2, "xgboost", "aim")
    assert find(jboost=1, xgboost=5, lightgbm=0) == (0.2, "xgboost", "unsure")
    assert find(jboost=0, xgboost=5) == (None, "xgboost", "not measured")
    steps = {step.name: make_entry(**dict.fromkeys(step.sources, 1.0))
             for step in report.PLAN}  # fmt: skip
    steps["one full tree"] = make_entry(jboost=3.0, sklearn=1.5)
    report.draw({"steps": steps}, tmp_path)
    assert "<svg" in (tmp_path / "benchmark.svg").read_text()
    rows = report.tabulate({"steps": steps})
    assert ["one full tree, 1k x 10 / scikit-learn", "2.00", "scikit-learn"] in rows


def test_benchmark_continues_a_killed_run(tmp_path, monkeypatch, capsys):
    """A step is measured for real, the other one killed; nothing is measured twice."""
    benchmark = importlib.import_module("benchmark")
    for name in ("confine", "signal"):  # these would outlive the test
        monkeypatch.setattr(
            benchmark, name, importlib.import_module("unittest.mock").Mock()
        )
    measured, run_step = [], benchmark.Bench.run

    def run_or_end(bench, step):
        if step.name == "fit 1k x 10" and not measured.count("killed"):
            measured.append("killed")
            raise KeyboardInterrupt
        measured.append(step.name)
        if step.name == "one full tree":
            return run_step(bench, step)
        return make_entry(**dict.fromkeys(step.sources, 1.0))

    monkeypatch.setattr(benchmark.Bench, "run", run_or_end)
    command = ["benchmark.py", "--quick", "--out", str(tmp_path)]
    command += ["--only", "fit 1k x 10", "one full"]
    monkeypatch.setattr(sys, "argv", command)
    benchmark.main()
    assert f"1 of {len(benchmark.PLAN)} steps" in capsys.readouterr().out
    benchmark.main()
    assert measured == ["one full tree", "killed", "fit 1k x 10"]
    result = json.loads((tmp_path / "benchmark.json").read_text())
    for entry in result["steps"]["one full tree"]["sources"].values():
        assert len(entry["readings"]) == 2 and entry["medians"]["time"] > 0
    (ratio,) = [row for row in result["ratios"] if row["label"].startswith("fit 1k")]
    assert ratio["measured"] == 1
    monkeypatch.setattr(sys, "argv", [*command, "--repeats", "1"])
    with pytest.raises(SystemExit, match=r"repeats 2, now it is 1.*--again"):
        benchmark.main()
    assert len(measured) == 3


# ---- gpu.py: what needs no GPU ------------------------------------------------------


def test_without_a_gpu_one_line_says_what_is_missing(monkeypatch, tmp_path):
    gpu = importlib.import_module("gpu")
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    said = run(monkeypatch, "gpu", "--out", tmp_path)
    assert said == "no GPU: JAX has no CUDA plugin: pip install 'jax[cuda13]'"
    assert not [*tmp_path.iterdir()]


WORKER = """
import json, os, sys, time
part, path, platform, *quick = sys.argv[1:]
assert (platform, quick) == ("cpu", ["quick"]) and os.environ["JAX_PLATFORMS"] == "cpu"
figures = {
    "device": {"device": "toy", "versions": {"jax": "1", "numpy": "2"}},
    "peers": {"xgboost_ratio": 0.75, "absent": {"cupy": "not found"}},
    "many": {"many_ratio": 0.125},
    "bits": {"rerun": {"scores": {"share": 0.0, "greatest": 0.0}},
             "cpu": {"histograms": {"share": 0.25, "greatest": 1.0},
                     "scores": {"share": 0.5, "greatest": 2.0}}},
    "tests": {"tests": {"passed": ["a::b"], "failed": ["c::d[1|2]"]}},
    "train": {"own_ratio": 1.5, "train_ms": None},
}
json.dump(figures[part], open(path, "w"))
if part == "many":
    os.abort()
if part == "train":
    print("the reason")
    sys.exit(3)
time.sleep(60 * (part == "bits"))
"""


def test_a_run_that_falls_back_to_the_cpu_ends(monkeypatch, tmp_path):
    parts, timing = map(importlib.import_module, ("gpu_parts", "gpu_timing"))
    monkeypatch.setattr(parts.jax, "default_backend", lambda: "cpu")
    with pytest.raises(RuntimeError, match="finds only"):
        parts.describe(timing.Task(tmp_path / "figures.json", "cuda", quick=True))


def test_parts_that_crash_or_hang_on_a_gpu_leave_their_figures(
    monkeypatch, tmp_path, capsys
):
    gpu = importlib.import_module("gpu")
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setattr(gpu, "WORKER", tmp_path / "worker.py")
    monkeypatch.setattr(gpu, "LEAST_LIMIT", 3.0)
    monkeypatch.setattr(gpu, "TICK", 0.05)
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)  # would outlive the test
    command = ["gpu.py", "--platform", "cpu", "--quick", "--seconds", "18"]
    command += ["--out", str(tmp_path), "--only"]
    for parts in (["peers", "tests"], ["many", "bits", "train"]):
        monkeypatch.setattr(sys, "argv", [*command, *parts])
        gpu.main()
    said = capsys.readouterr().out
    figures = json.loads((tmp_path / "gpu.json").read_text())["figures"]
    assert figures["device"].startswith("toy")
    assert (tmp_path / "gpu.png").stat().st_size > 1000
    for line in (
        "Device: toy",
        "| to XGBoost, 20,000 x 28, a tree | 1 | 0.6 | 0.75 | reached |",
        "| custom loss to the equal built-in, a tree | 1.02 | 1 | 1.500 | MISSED |",
        "| 20,000 x 28, depth 2, ms a tree |  |  |  | below noise |",
        "side by side, to in turn | 0.5 | 0.2 | 0.12 | aim |",
        "| run to run | same bits | same bits | same bits | aim |",
        "| 1 of 1 differ: histograms: 25 %, up to 1 | MISSED |",
        "| 50,000 x 40, depth 2, ms a tree |  |  |  | not measured |",
        "without cupy (not found)",
        "1 passed, 1 failed: c::d[1/2]",
        "Found: 3 of 7 targets were measured, 1 at the aim, 1 within reach, 1 missed",
    ):
        assert line in said, line
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert parts["many"]["state"].startswith("failed with -6")
    assert parts["train"]["state"] == "failed with 3: the reason"
    assert parts["bits"]["state"] == "killed after 3 s"
    assert parts["peers"]["state"] == "done"


def test_slopes_of_the_gpu_run_are_saved_and_a_failure_is_named(tmp_path, monkeypatch):
    timing = importlib.import_module("gpu_timing")
    monkeypatch.setattr(timing, "time_call", lambda train: train())
    task = timing.Task(tmp_path / "figures.json", "cpu", quick=True)

    def fail(rounds):
        raise ValueError("out of memory\nand more")

    trainers = {"a_ms": lambda n: 1 + n / 4, "b_ms": lambda n: 2 + n / 2, "c_ms": fail}
    ratios = {"ratio": ("a_ms", "b_ms"), "other": ("a_ms", "c_ms")}
    timing.read_slopes(task, trainers, (1, 5), ratios)
    assert json.loads(task.path.read_text()) == {
        "a_ms": 250, "b_ms": 500, "ratio": 0.5, "other": None,
        "errors": {"c_ms": "ValueError: out of memory"},
    }  # fmt: skip


@pytest.mark.parametrize("part", ["operations", "many"])
def test_parts_of_the_gpu_run(part, monkeypatch, tmp_path):
    """On the CPU, with a few rows."""
    parts, timing = map(importlib.import_module, ("gpu_parts", "gpu_timing"))
    monkeypatch.setattr(timing, "choose_times", lambda function: 1)
    monkeypatch.setattr(timing, "READINGS", 1)
    task = timing.Task(tmp_path / "figures.json", "cpu", quick=True)
    task.sizes = task.sizes._replace(
        rows=300, features=8, depth=1, models=2, model_rows=200, model_rounds=2
    )  # fmt: skip
    parts.PARTS[part](task)
    found = json.loads(task.path.read_text())
    assert found.get("equal_models", "2 of 2") == "2 of 2"
    assert "errors" not in found and len(found) >= 1


def test_tuning_is_compared_with_the_defaults(monkeypatch, tmp_path, capsys):
    for name in ("optuna", "catboost"):  # peers that may not be installed
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("fit", "tune"):
        small = partial(getattr(jboost, name), max_depth=2, **SMALL)
        monkeypatch.setattr(jboost, name, small)
    given = ["tuning.py", "--rows", "250", "--seconds", "0.1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", given)
    importlib.import_module("tuning").main()
    result = json.loads((tmp_path / "tuning.json").read_text())
    (found,) = result["results"].values()
    assert {*found} == {"rows", "defaults", "tune"}
    ratio = found["tune"]["loss"] / found["defaults"]["loss"]
    assert f"| geometric mean |  | {ratio:.3f} |  |" in capsys.readouterr().out
    assert result["figures"]["tables"]["losses"][1][2] == f"{ratio:.3f}"


def test_families_are_trained_once_and_tabulated(monkeypatch, tmp_path, capsys):
    families = importlib.import_module("families")
    calls = []

    def train(family, way, default):
        calls.append(way)
        if family == "tfp.Moyal":
            raise ValueError("no samples")
        held_out = 0.5 if way == "formula" else 0.25
        found = dict(rise=0.0, scale=2.0, held_out=held_out, seconds=3.0)
        return dict(family=family, way=way, default=default, rounds=100) | found

    monkeypatch.setattr(families, "train", train)
    monkeypatch.setattr(families, "MODULES", dict.fromkeys(families.MODULES, "jax"))
    arguments = ["families", "--out", tmp_path, "--only", "tfp.Moyal", "tfp.Normal"]
    monkeypatch.setattr(sys, "argv", list(map(str, arguments)))
    families.main()
    families.main()
    assert len(calls) == 4
    said = capsys.readouterr().out
    assert "| tfp.Normal | 2 | yes | 0.2500 | 0.5000 | -0.2500 | 3.0, 3.0 |" in said
    assert "| tfp.Moyal | 2 | ValueError: no samples |" in said
    figures = json.loads((tmp_path / "families.json").read_text())["figures"]
    command = "python experiments/families --only tfp.Moyal tfp.Normal"
    assert figures["command"] == command
