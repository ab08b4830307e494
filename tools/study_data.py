"""Fetches what the runs of docs/study.md measured, by class and seed, and compares it with its checksums.

    python -m tools.study_data --out=studies                   from the release, whose address is `RELEASE`
    python -m tools.study_data --out=studies --source=FOLDER   from a folder, or another address
    python -m tools.study_data --out=studies --list            a table of the files in --out, with checksums

The files are assets of a release, as they are larger than what the repository holds. `python -m benchmarks.study` and
`python -m benchmarks.second_level` make them again.
"""

from __future__ import annotations

import hashlib
import pathlib
import sys
import urllib.request

from tools.numbers import Results, command_line, lookup

#: The address of the assets, such as https://github.com/OWNER/tfdml/releases/download/v0.1.0; empty until it is known.
RELEASE = ""


def fetch(source: str, out: pathlib.Path, expected: dict[str, str]) -> None:
    """Write the files to a folder.

    Args:
        source: An address, or a local folder.
        out: The folder; made where it is missing.
        expected: The SHA-256 of each file.
    """
    address = source if "://" in source else pathlib.Path(source).resolve().as_uri()
    out.mkdir(parents=True, exist_ok=True)
    for name, checksum in expected.items():
        with urllib.request.urlopen(f"{address.rstrip('/')}/{name}", timeout=60) as response:
            data = response.read()
        if (digest := hashlib.sha256(data).hexdigest()) != checksum:
            sys.exit(f"{name}: its SHA-256 is {digest}, not {checksum}; nothing was written of it")
        (out / name).write_bytes(data)


def main() -> None:
    """Entry point."""
    parser = command_line(__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--source", default=RELEASE)
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    if arguments.list:
        add = Results(arguments.json).table("table", "file", "kB", "SHA-256")
        for path in sorted(arguments.out.glob("*.json")):
            data = path.read_bytes()
            add(path.name, f"{len(data) / 1e3:.0f}", hashlib.sha256(data).hexdigest())
    elif not arguments.source:
        parser.error("the address of the release is not known yet; name a folder or an address by --source")
    else:
        rows = lookup("study_data/table")["rows"]
        fetch(arguments.source, arguments.out, {name: checksum for name, _, checksum in rows})


if __name__ == "__main__":
    main()
