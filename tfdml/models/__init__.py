"""The models: an embedder, and the learner that trains it."""

from tfdml.models.embedder import Embedder as Embedder
from tfdml.models.embedder import Head as Head
from tfdml.models.ensemble import AttentionEnsemble as AttentionEnsemble
from tfdml.models.interpolation import interpolate as interpolate
from tfdml.models.learner import MetricLearner as MetricLearner
from tfdml.models.reduced import MomentEmbedder as MomentEmbedder
from tfdml.models.reduced import StackedEmbedder as StackedEmbedder
from tfdml.models.reduced import TruncatedEmbedder as TruncatedEmbedder
from tfdml.models.reduced import WhitenedEmbedder as WhitenedEmbedder
from tfdml.models.reduced import stack as stack
from tfdml.models.reduced import with_whitening as with_whitening
from tfdml.models.text import ByteTokenizer as ByteTokenizer
from tfdml.models.text import TextEmbedder as TextEmbedder
from tfdml.models.text import byte_encoder as byte_encoder
from tfdml.workarounds import multi_worker_strategy as multi_worker_strategy

# What embeds images by itself, and is saved, evaluated and exported.
AnyEmbedder = Embedder | MomentEmbedder | WhitenedEmbedder | TruncatedEmbedder | StackedEmbedder
