"""Training data: documents, their tokens in one stream, and the samples of each step."""

from fivefold.train.data.documents import default_corpus, find_files, read_documents
from fivefold.train.data.samples import IGNORED, Batch, Samples, data_hash
from fivefold.train.data.tokenizer import Tokenizer, open_tokenizer
from fivefold.train.data.tokens import TokenFile, open_tokens, prepare

__all__ = [
    "IGNORED",
    "Batch",
    "Samples",
    "TokenFile",
    "Tokenizer",
    "data_hash",
    "default_corpus",
    "find_files",
    "open_tokenizer",
    "open_tokens",
    "prepare",
    "read_documents",
]
