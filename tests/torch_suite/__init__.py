"""torch's own tests of torch.distributed, on the backend "bagua".

`python -m tests.torch_suite` (`make test-torch`) runs them on gloo and on "bagua" and compares; not_passed.txt lists
those that gloo passes and "bagua" does not, each with its reason.
"""
