"""The table of loaders whose order, and whose place in an interrupted epoch, are those of a plain loop."""

import random

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, WeightedRandomSampler

SAMPLES = 16
FORK = {"multiprocessing_context": "fork"}


class Numbers(Dataset):
    """It knows which were read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        self.read.append(index)
        return index


class Noisy(Numbers):
    """It draws for each sample, from each of the generators."""

    def __getitem__(self, index):
        return super().__getitem__(index), torch.rand(()).item() + random.random() + float(np.random.rand())


class Stream(IterableDataset):
    """Shuffles through a buffer: it draws all along an epoch."""

    def __iter__(self):
        buffer = []
        for number in range(SAMPLES):
            buffer.append(number)
            if len(buffer) == 5:
                yield buffer.pop(int(torch.randint(5, ())))
        yield from buffer


class Permuted(IterableDataset):
    """Draws its order at the start of an epoch, and for each sample."""

    def __iter__(self):
        for index in torch.randperm(SAMPLES).tolist():
            yield index, torch.rand(()).item()


class By(Sampler):
    """A sampler of the user's own. Its attribute `generator` may be another than torch's."""

    def __init__(self, shuffle=None, generator=None):
        self.shuffle, self.generator = shuffle or generator.shuffle, generator

    def __iter__(self):
        items = list(range(SAMPLES))
        self.shuffle(items)
        yield from items

    def __len__(self):
        return SAMPLES


class Uncounted(Sampler):
    def __iter__(self):
        for _ in range(SAMPLES):
            yield int(torch.randint(SAMPLES, ()))


class Pairs(Sampler):
    """A batch sampler of the user's own."""

    def __init__(self, draws=torch.randperm):
        self.draws = draws

    def __iter__(self):
        for index in self.draws(SAMPLES // 2).tolist():
            yield [2 * index, 2 * index + 1]

    def __len__(self):
        return SAMPLES // 2


# Of a dataset (what streams give is their own), and of the batch of one process, which several data ranks divide.
LOADERS = {
    "in order": lambda data, batch: DataLoader(data, batch),
    "shuffled": lambda data, batch: DataLoader(data, batch, shuffle=True),
    "generator": lambda data, batch: DataLoader(data, batch, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "both generators": lambda data, batch: DataLoader(
        data, batch, sampler=RandomSampler(data, True, SAMPLES, torch.Generator()), generator=torch.Generator()
    ),
    "weighted": lambda data, batch: DataLoader(data, batch, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)),
    "drop last": lambda data, batch: DataLoader(data, batch, shuffle=True, drop_last=True),
    "python": lambda data, batch: DataLoader(data, batch, sampler=By(random.shuffle)),
    "numpy's generator": lambda data, batch: DataLoader(data, batch, sampler=By(generator=np.random.default_rng(0))),
    "no length": lambda data, batch: DataLoader(data, batch, sampler=Uncounted()),
    "pairs": lambda data, batch: DataLoader(data, batch_sampler=Pairs()),
    "pairs, numpy": lambda data, batch: DataLoader(data, batch_sampler=Pairs(np.random.permutation)),
    "single samples": lambda data, batch: DataLoader(data, None, shuffle=True),
    "stream": lambda data, batch: DataLoader(Stream(), batch),
    "stream, a worker": lambda data, batch: DataLoader(Stream(), batch, num_workers=1, **FORK),
    "workers": lambda data, batch: DataLoader(data, batch, shuffle=True, num_workers=1, **FORK),
    "workers that stay": lambda data, batch: DataLoader(
        data, batch, shuffle=True, num_workers=2, persistent_workers=True, **FORK
    ),
}
IN_BATCHES = ("pairs", "single", "stream")
"""Data ranks take turns in batches of these, in samples of all others."""


def seed_all(seed=5):
    for each in (torch.manual_seed, random.seed, np.random.seed):
        each(seed)


def plain(batch):
    """Without tensors."""
    if isinstance(batch, (list, tuple)):
        return [plain(value) for value in batch]
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def samples_of(batch):
    batch = plain(batch)
    return batch if isinstance(batch, list) else [batch]


def joined(kind, mine, theirs):
    """The samples of the batches of two data ranks, in the order of one process."""
    pairs = zip(mine, theirs, strict=True)
    if kind.startswith(IN_BATCHES):
        return [sample for pair in pairs for batch in pair for sample in batch]
    return [sample for pair in pairs for both in zip(*pair, strict=True) for sample in both]
