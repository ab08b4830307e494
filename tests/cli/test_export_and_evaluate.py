"""bin/export and bin/evaluate: what is shipped measures as what was trained."""

import json

import pytest


@pytest.fixture(scope="module")
def exported(finished_run, command, tmp_path_factory):
    out = tmp_path_factory.mktemp("models") / "tiny"
    done = command("export", f"--run_dir={finished_run}", f"--out={out}")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "saved_model" in done.stdout
    assert "cosine min 1.000000" in done.stdout
    return out


@pytest.mark.slow
def test_run_folder_and_saved_model_measure_the_same(finished_run, exported, command, tmp_path):
    results = {}
    for name, model in (("run", finished_run), ("exported", exported)):
        path = tmp_path / f"{name}.json"
        data = ["--dataset=glyphs", "--dataset_options=images_per_class=4, size=32"] if name == "exported" else []
        done = command("evaluate", f"--model={model}", f"--json={path}", *data)
        assert done.returncode == 0, done.stderr[-3000:]
        results[name] = json.loads(path.read_text())
    trained = json.loads((finished_run / "result.json").read_text())["metrics"]
    for metric in ("recall@1", "recall@8", "map@r", "r_precision"):
        assert results["run"][metric] == pytest.approx(trained[metric], abs=1e-6)
        # Ranks of all but equal distances may swap between two graphs.
        assert results["exported"][metric] == pytest.approx(trained[metric], abs=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags", "says"),
    [
        ("export", ["--run_dir=nowhere", "--out=out"], "nowhere"),
        ("export", ["--run_dir=nowhere"], "--out"),
        ("export", ["--run_dir=x", "--out=y", "--formats=onnxx"], "onnxx"),
        ("export", ["--run_dir=x", "--out=y", "--min_cosine=2"], "--min_cosine"),
        ("export", ["--run_dir=x", "--out=y", "--max_recall_drop=-1"], "--max_recall_drop"),
        ("export", ["--run_dir=x", "--out=y", "--dry_run"], "no embedder"),
        ("export", ["--run_dir=x", "--out=gs://bucket/y"], "--out=gs://bucket/y: only local folders"),
        ("embed", ["--model=x", "--out=gs://bucket/y"], "--out=gs://bucket/y: only local folders"),
        ("train", ["--dataset=glyphs", "--run_dir=gs://bucket/y", "--dry_run"], "--run_dir=gs://bucket/y: only local"),
        ("evaluate", ["--model=nowhere"], "--model=nowhere: there is no such file or folder"),
        ("evaluate", ["--model=."], "--dataset is missing"),
        ("evaluate", ["--model=nowhere", "--dataset=glyphs"], "nowhere"),
        ("evaluate", ["--dataset=glyphs"], "--model"),
        ("evaluate", ["--model=x", "--ks=one"], "--ks"),
    ],
)
def test_wrong_input_is_one_clear_line(name, flags, says, command, tmp_path):
    done = command(name, *flags, cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert says in next(line for line in done.stderr.splitlines() if "error:" in line)
    assert not list(tmp_path.iterdir())
