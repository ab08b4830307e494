"""The time of the images that cost most among those that are allowed: `docs/trust.md`.

    python -m benchmarks.worst_image
    python -m benchmarks.worst_image --megapixels=4                        a quick try

Each has as many pixels as a SavedModel takes. Files are made of few bytes: what costs is the size
that they state. A row shows the bytes of a file and the seconds of a processor that `decode_image`
takes, the second time.
"""

import io
import os
import struct
import time

from tools.numbers import Results, command_line

# A Huffman table whose only code, one bit, begins a run of 2^14 and more blocks without values.
_RUN_TABLE = b"\xff\xc4\0\x14\x10\1" + bytes(15) + b"\xe0"
_RUN = 2**15 - 1


def jpeg(side, scans):
    """Return a gray-looking progressive JPEG of three full channels whose scans, after the first,
    visit each value of each block."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "JPEG", progressive=True, subsampling=0)
    data = file.getvalue()
    frame, first = data.index(b"\xff\xc2"), data.index(b"\xff\xda")
    size = struct.pack(">HH", side, side)
    header = data[: frame + 5] + size + data[frame + 9 : first + 14] + b"\xff\0" * 8
    blocks = ((side + 7) // 8) ** 2
    bits = ("0" + "1" * 14) * (blocks // _RUN + 1)
    bits += "1" * (-len(bits) % 8)
    runs = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")
    scan = b"\xff\xda\0\x08\1%c\0\1\x3f\x10" + runs
    refined = b"".join(scan % (1 + number % 3) for number in range(scans - 1))
    return header + _RUN_TABLE + refined + b"\xff\xd9"


def images(side, scans):
    """Return the images by name."""
    import numpy as np
    from PIL import Image

    def encoded(image, kind, **options):
        file = io.BytesIO()
        image.save(file, kind, **options)
        return file.getvalue()

    plain = Image.new("RGBA", (side, side), (9, 9, 9, 9))
    noise = np.random.default_rng(0).integers(0, 256, (side // 8, side // 8, 3), np.uint8)
    repeated = Image.fromarray(noise).resize((side, side), Image.Resampling.BILINEAR)
    return {
        f"JPEG, {scans} scans": jpeg(side, scans),
        "JPEG, 10 scans": jpeg(side, 10),
        "JPEG of a picture": encoded(repeated, "JPEG", quality=90),
        "PNG, transparent": encoded(plain, "PNG", compress_level=1),
    }


def main():
    """Parse the command line and run."""
    parser = command_line(__doc__)
    parser.add_argument("--megapixels", type=int, default=100)
    args = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    from tfdml.data.decoding import decode_whole

    side = int(args.megapixels**0.5 * 1000)
    scans = min(2**31 // side**2, 100)
    row = Results(args.json).table("table", "image", "bytes", "seconds")
    for name, data in images(side, scans).items():
        for _ in range(2):
            started = time.process_time()
            decode_whole(tf.constant(data))
        row(name, f"{len(data):,}", f"{time.process_time() - started:.1f}")


if __name__ == "__main__":
    main()
