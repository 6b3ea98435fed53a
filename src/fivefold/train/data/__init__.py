"""Training data: documents, their tokens in one stream, and the samples of each step."""

from fivefold.train.data.documents import default_corpus
from fivefold.train.data.samples import Samples, data_hash
from fivefold.train.data.tokenizer import open_tokenizer
from fivefold.train.data.tokens import open_tokens, prepare

__all__ = ["Samples", "data_hash", "default_corpus", "open_tokenizer", "open_tokens", "prepare"]
