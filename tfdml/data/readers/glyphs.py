"""The built-in data set: characters drawn on the fly in the fonts that come with matplotlib.
Nothing to download."""

import collections
import functools
import hashlib
import math
import os
import pathlib
import unicodedata

import numpy as np
from absl import logging
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from tfdml.data.dataset import ImageDataset
from tfdml.data.images import ArrayImages
from tfdml.errors import UserError

# How the characters were chosen: of the digits and ASCII letters, then the Greek, Cyrillic,
# Armenian and Georgian letters, then the other Latin letters, then symbols, those that have no
# canonical decomposition, are at most three times as long as wide, and are in six or more of the
# sixteen DejaVu and STIX faces, of two or more families. Two characters look alike if, in any two
# faces, with one turned by -20, -10, 0, 10 or 20 degrees, the renderings scaled to one bounding box
# and blurred a little correlate by 0.9 or more. Within each group, in the order above, the
# character with the fewest look-alikes left is kept and they are dropped, until none is left;
# symbols in more faces went first, up to 320 characters in all. So none of c/C, o/O/0,
# A/Alpha/Cyrillic A has two classes.

CHARACTERS = (
    "#$%&2345789;<>@ACDEGJKLMNPRTUVWXabdefkmnqyz¤§©¬±¶÷ŒƈƜƝƣƥƸƺȵȼȾɀɁɂ"
    "ɕɚɝɠʁʂʅʍʎʐʑʛʞʣʤʦʨʩʫʬʭʮͰͲͶͼΞΣΨαλμνξςωϗϞϡϻϼϿЂЉЊЋЖЫЮЯлчъџѣѤѬѱҐғҘқҡҢ"
    "ҦҰҳҵҷӃӈӔӕӘӶԓԔԴԶԷԸԹԻԽԿՀՃՇՊՓՖճչպջփֆႢႣႥႧႨႩႪႫႬႮႰႳႴႵႾႿჂჄჅდლოჟრტფწჭჯჴᴑ"
    "ᴖᴗᴝᴞᴟẞỺỻ‰€↖↢↦↨↬↭↰↲↳↵↷↸↹↺↻↼⇅⇇⇋⇖⇗⇙⇠⇡⇣⇤⇥⇩⇪⇵⇶⇷∓√∝∞∟∸∹∺≂≃≐≑≒≓≡⊂⊆⊇⊏⊐⊔⊖"
    "⊟⊠⊢⊣⊥⌂⌐⌑⌘⌙■▢▣▤▥▭▯▱△▷▸▻▽◀◁◅◇◌◍◐◑◒◓◔◕◙◛◜◞◟◢◣◤◥◫◬♭♮ⱨⱫⱱⱳꙑꙔꙖꜨꜩꜶꜻꜽꝋꞪꟻꟽ"
)

# Letters whose Unicode names can be read off their shape: Latin, Greek and Cyrillic ones with at
# most one mark, which the twelve DejaVu faces have. Scaled to one bounding box, no two correlate by
# more than 0.93 in DejaVu Sans; of two alike, such as A and Alpha, the first is kept. Each word of
# the names is in four or more of them.
NAMED_LETTERS = (
    "ABCDEFGHIJKLMNOPRSTUVWXYZabcdefghijklmnoprstuvwxyzÀÄÅÆÇÈËÌÍÎÏÑÒÖØÙÜÝàáâãäåæçèéêëìíîï"
    "ñòóôõöøùúûüýÿāĂăĄąĆćĉċĎēĕĖėĘęĜĝğĠġĢĤĥĦħĨĩīĭĮįĴĵĶķĹĺĻļĽľĿŀŁłŃńŅņŇňōŏőŔŕŖŗŘřŚśŝŞşŢţŤťŦ"
    "ŧũūŭŮůűŲųŴŵŶŷŸŹźżƀƁƂƃƇƈƊƋƌƑƒƓƖƗƘƙƟƠơƤƬƭƯưƱƲƳƴƵƶǏǐǢǣǨǩǪǫǵǹǼǽȀȁȃȄȅȇȈȉȊȋȌȍȏȐȑȓȔȕȗȘșȚțȟȡ"
    "ȤȥȧȨȩȮȯȴȵȶȺȻȼɃɍΊΎΏΩίιυωύώЍЖЗИКУЧЫЭгжзикнчыэѝҒғҔҕҘҙҚқҢңӁӂӃӄӇӈӜӝӞӟӢӣӬӭӮӲӳӴӵӶӷӸӹḀḁḂḃḄḅḆ"
    "ḇḊḋḌḍḎḏḒḓḘḙḚḛḞḟḠḡḢḣḤḥḨḩḪḫḬḭḱḲḳḴḵḶḷḺḻḼḽḾḿṁṂṅṆṇṈṉṊṋṔṕṖṗṙṚṛṞṟṡṪṫṭṮṯṰṱṲṳṴṵṶṷṼṽṾṿẁẃẅẇẊẋẌẍ"
    "ẏẑẒẓẔẕẖẗẘẙẠạẽịụỳỴỸỹ"
)

_DEJAVU_STIX = (
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique",
    "DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique", "DejaVuSansMono-BoldOblique",
    "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic",
    "STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta",
)  # fmt: skip
# The Computer Modern faces put other shapes than Unicode's at many code points; digits and letters
# are right.
_COMPUTER_MODERN = ("cmr10", "cmb10", "cmss10", "cmti10", "cmtt10")

# The screening above allows for two images that are turned by this much in opposite directions.
_MAX_TURN_DEGREES = 10.0
_MIN_CONTRAST = 90.0


def split_characters() -> dict[str, str]:
    """Return the characters of either split, in the order of their labels; train has two thirds of
    them.

    The order is that of a hash, which mixes the scripts and is the same everywhere and for every
    seed.
    """
    mixed = _mixed(CHARACTERS)
    num_train = round(len(mixed) * 2 / 3)
    return {"train": mixed[:num_train], "test": mixed[num_train:]}


def _mixed(characters: str) -> str:
    return "".join(sorted(characters, key=lambda c: hashlib.sha256(c.encode()).digest()))


def split_named_letters() -> dict[str, str]:
    """Return the letters of either split, a third to test. Each word of a test name is in three
    training names.

    Example:
        >>> [unicodedata.name(letter) for letter in split_named_letters()["test"][:2]]
        ['LATIN SMALL LETTER E WITH MACRON', 'LATIN CAPITAL LETTER A WITH DOUBLE GRAVE']
    """
    word_counts = collections.Counter(" ".join(map(unicodedata.name, NAMED_LETTERS)).split())
    train = test = ""
    for letter in _mixed(NAMED_LETTERS):
        words = unicodedata.name(letter).split()
        are_common = all(word_counts[word] > 3 for word in words)
        if are_common and len(test) < len(NAMED_LETTERS) // 3:
            test += letter
            word_counts.subtract(words)
        else:
            train += letter
    return {"train": train, "test": test}


def read(
    data_dir: str | os.PathLike | None = None,
    split: str = "train",
    *,
    images_per_class: int = 20,
    size: int = 64,
    seed: int = 0,
    texts: bool = False,
) -> ImageDataset:
    """Draws one split: 213 characters to train, 107 others to test; with texts 293 and 146 letters.

    An image is a pure function of (seed, character, instance, size): face, place, scale, turn,
    slant, thickness, colors, background, clutter and noise vary, the character does not.

    Args:
        data_dir: Ignored.
        split: `"train"` or `"test"`.
        images_per_class: How many images of each character to draw.
        size: Height and width in pixels.
        seed: Another seed draws other images of the same classes.
        texts: Draw the letters of `split_named_letters`, each image with its Unicode name as text
            and class name.

    Raises:
        UserError: An option is out of range, or matplotlib's fonts are not there.

    Example:
        >>> read(split="test", images_per_class=4).images.data.shape
        (428, 64, 64, 3)
    """
    for name, value, least in (
        ("images_per_class", images_per_class, 1),
        ("size", size, 16),
        ("seed", seed, 0),
    ):
        if value < least:
            raise UserError(f"glyphs: {name} must be {least} or more, it is {value}")
    splits = split_named_letters() if texts else split_characters()
    characters = splits[split]
    count = len(characters) * images_per_class
    logging.info("glyphs: drawing %s images of the %s split", f"{count:,}", split)
    first = 0 if split == "train" else len(splits["train"])
    data = np.empty((count, size, size, 3), np.uint8)
    names = []
    for row in range(len(data)):
        character, instance = characters[row // images_per_class], row % images_per_class
        data[row] = draw(character, instance, size=size, seed=seed)
        names.append(f"U+{ord(character):04X}/{instance}")
    labels = first + np.arange(len(data)) // images_per_class
    class_names = list(map(unicodedata.name, characters) if texts else characters)
    text_of_images = np.repeat(class_names, images_per_class) if texts else None
    images = ArrayImages(data, tuple(names))
    return ImageDataset(
        "glyphs", split, images, labels, dict(enumerate(class_names, first)), texts=text_of_images
    )


def draw(character: str, instance: int, *, size: int = 64, seed: int = 0) -> np.ndarray:
    """Draws one image of a character.

    Args:
        character: One that at least one of the faces has.
        instance: Which image of that character.
        size: Height and width in pixels.
        seed: As of `read`.

    Returns:
        (size, size, 3) uint8.

    Raises:
        UserError: No face has the character, or matplotlib's fonts are not there.

    Example:
        >>> draw("Щ", 0, size=32).shape
        (32, 32, 3)
    """
    faces = faces_of(character)
    if not faces:
        raise UserError(f"glyphs: no face has the character {character!r}")
    rng = np.random.default_rng((seed, ord(character), instance))
    face = faces[int(rng.integers(len(faces)))]
    thickening = int(rng.integers(0, max(2, size // 21)))
    glyph = _render(character, face, size * 3 // 2, thickening)
    mask = _place(glyph, size, rng)
    background = _background(size, rng)
    ink = _ink(background.mean((0, 1)), rng)
    image = background + mask[..., None] * (ink - background)
    image += rng.standard_normal(image.shape, np.float32) * rng.uniform(4, 18)
    return np.clip(np.rint(image), 0, 255).astype(np.uint8)


def faces_of(character: str) -> tuple[str, ...]:
    """Return the names of the faces that have a character of its own shape there."""
    faces = tuple(face for face in _DEJAVU_STIX if ord(character) in _code_points(face))
    if character.isascii() and character.isalnum():
        faces += _COMPUTER_MODERN
    return faces


def font_path(face: str) -> pathlib.Path:
    """Where matplotlib keeps a face.

    Raises:
        UserError: It is not there.
    """
    import matplotlib  # slow to import, so only where something is drawn

    path = pathlib.Path(matplotlib.get_data_path(), "fonts", "ttf", f"{face}.ttf")
    if not path.is_file():
        raise UserError(f"glyphs: the font {path} is missing: pip install matplotlib")
    return path


@functools.cache
def _code_points(face: str) -> frozenset[int]:
    from matplotlib.ft2font import FT2Font

    return frozenset(FT2Font(str(font_path(face))).get_charmap())


@functools.lru_cache(maxsize=64)
def _font(face: str, em: int) -> ImageFont.FreeTypeFont:
    # The basic layout draws alike with and without the optional text-shaping library.
    return ImageFont.truetype(str(font_path(face)), em, layout_engine=ImageFont.Layout.BASIC)


def _render(character: str, face: str, em: int, thickening: int) -> Image.Image:
    """Return the glyph in white on black, cut out."""
    font = _font(face, em)
    left, top, right, bottom = (int(v) for v in font.getbbox(character, stroke_width=thickening))
    glyph = Image.new("L", (right - left, bottom - top))
    ImageDraw.Draw(glyph).text((-left, -top), character, 255, font, stroke_width=thickening)
    return glyph


def _place(glyph: Image.Image, size: int, rng: np.random.Generator) -> np.ndarray:
    """Return the glyph scaled, turned, slanted, shifted and blurred: (size, size), 0 to 1."""
    turn = math.radians(rng.uniform(-_MAX_TURN_DEGREES, _MAX_TURN_DEGREES))
    extent = size * rng.uniform(0.55, 0.85)
    scale = extent / max(glyph.size)
    stretch = math.exp(rng.uniform(-0.2, 0.2))
    slant = rng.uniform(-0.2, 0.2)
    turned = np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
    forward = scale * turned @ np.array([[stretch, slant], [0.0, 1 / stretch]])
    # PIL wants the way back, from a pixel of the result to one of the glyph.
    back = np.linalg.inv(forward)
    room = (size - extent) / 2
    center = size / 2 + rng.uniform(-room, room, 2)
    offset = np.array(glyph.size) / 2 - back @ center
    matrix = (*back[0], offset[0], *back[1], offset[1])
    placed = glyph.transform(
        (size, size), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR
    )
    placed = placed.filter(ImageFilter.GaussianBlur(size / 64 * rng.uniform(0.0, 1.0)))
    return np.asarray(placed, np.float32) / 255


def _background(size: int, rng: np.random.Generator) -> np.ndarray:
    """Return a gradient between two colors with faint lines and spots on it: (size, size, 3)."""
    base = rng.uniform(0, 255, 3)
    colors = np.clip(base + rng.uniform(-40, 40, (2, 3)), 0, 255)
    angle = rng.uniform(0, 2 * math.pi)
    ramp = np.linspace(-0.5, 0.5, size, dtype=np.float32)
    rising = ramp[:, None] * math.sin(angle) + ramp[None, :] * math.cos(angle)
    along = 0.5 + rising / math.sqrt(2)
    gradient = colors[0] + along[..., None] * (colors[1] - colors[0])
    image = Image.fromarray(gradient.astype(np.uint8))
    pencil = ImageDraw.Draw(image)
    for _ in range(int(rng.integers(2, 7))):
        color = tuple(int(v) for v in np.clip(base + rng.uniform(-70, 70, 3), 0, 255))
        x0, y0, x1, y1 = rng.uniform(-0.2 * size, 1.2 * size, 4)
        if rng.random() < 0.5:
            pencil.line((x0, y0, x1, y1), color, width=int(rng.integers(1, max(2, size // 12))))
        else:
            box = (min(x0, x1), min(y0, y1), max(x0, x1), max(y0, y1))
            pencil.ellipse(box, outline=color, width=int(rng.integers(1, max(2, size // 12))))
    return np.asarray(image, np.float32)


def _ink(background: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return a color that stands out from the background in brightness."""
    luma = np.array([0.299, 0.587, 0.114], np.float32)
    colors = rng.uniform(0, 255, (32, 3)).astype(np.float32)
    contrast = np.abs((colors - background) @ luma)
    enough = np.flatnonzero(contrast >= _MIN_CONTRAST)
    return colors[enough[0] if len(enough) else int(contrast.argmax())]
