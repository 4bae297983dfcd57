"""The tests. Each folder is a room of `make test ROOM=...`, and mirrors one of halfmesh/, but for these:

support/       what several tests use: ranks (tests on several processes), models, pages (snippets of the docs)
composition/   every cell of the composition table trains to parity with one process, or is rejected
faults_on_purpose/   faults put into halfmesh, or a user's model, with what has to see each
faults/        ranks that raise, hang, are killed, or are told to end
models_table/  models of timm, torchvision and transformers
docs/, examples/, benchmarks/         pages, scripts and the harness of the benchmarks
scripts/       training scripts that people run (nanoGPT, mnist, a word model), converted: what reasonable user code is
gpu/           what needs a CUDA device
"""
