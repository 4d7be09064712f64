//! The parsers of everything that comes from another process, fed with bytes that no correct process sends.
//!
//! | file | what it is |
//! |---|---|
//! | `fuzz` | the fuzzer: `make fuzz`, and a bounded run in `make test` |
//! | `targets` | each kind of input, with its parser and what must hold |
//! | `examples` | the corpus as the encoders write it |
//! | `corpus.txt` | the committed corpus |
//! | `mutate` | changes of an input |
//! | `allocations` | how much memory a parser holds at most |

mod allocations;
pub(super) mod examples;
mod fuzz;
mod mutate;
mod targets;
