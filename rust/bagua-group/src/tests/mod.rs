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

/// Returns a loopback address that only this process uses. A free port there is not taken by another test, nor by an
/// outgoing connection, whose local address is 127.0.0.1.
pub(super) fn own_host() -> String {
    let [.., high, middle, low] = std::process::id().to_be_bytes();
    format!("127.{}.{middle}.{low}", 64 | high)
}
