"""`make quickstart`: train, export and report on the built-in glyphs, and print the next steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def _run(*command: str) -> None:
    print(f"\n$ tfdml {' '.join(command)}", flush=True)
    status = subprocess.run(
        [sys.executable, "bin/tfdml", *command], cwd=ROOT, check=False
    ).returncode
    if status:
        print(f"quickstart: {command[0]} ended with status {status}", file=sys.stderr)
        sys.exit(status)


def _free(folder: Path) -> Path:
    candidates = [folder, *(folder.with_name(f"{folder.name}-{i}") for i in range(2, 1000))]
    return next(path for path in candidates if not path.exists())


def main() -> None:
    """Entry point."""
    run = _free(ROOT / "runs" / "quickstart").relative_to(ROOT)
    model = Path("models") / run.name
    _run("train", "--flagfile=configs/quickstart.flags", f"--run_dir={run}")
    _run("export", f"--run_dir={run}", f"--out={model}")
    result = json.loads((ROOT / run / "result.json").read_text())
    before, after = result["metrics_before"]["recall@1"], result["metrics"]["recall@1"]
    newest = max(
        (ROOT / model).iterdir(), key=lambda entry: int(entry.name) if entry.name.isdecimal() else 0
    )
    print(f"""
Done. On {result["protocol"].split("on ")[-1]}:
  Recall@1        {100 * before:.1f} % before training -> {100 * after:.1f} % after
  embedder of     epoch {result["epoch"]}, {result["selection"]}
  report          {ROOT / run}/report/index.html   (open it in a browser)
  embedder        {ROOT / run}/embedder.keras      (keras.saving.load_model after import tfdml)
  SavedModel      {newest}   (image bytes -> embedding; needs TensorFlow only)
  metrics, log    {ROOT / run}/result.json, metrics.jsonl, tensorboard/

Next, on your own images, one folder per class (half of the classes, by name, are kept unseen, to
measure on):
  tfdml train --dataset=folder --data_dir=PATH/TO/PHOTOS --backbone=mobilenetv2 \\
      --weights=imagenet --run_dir=runs/photos
""")


if __name__ == "__main__":
    main()
