//! The collective `ipc`: ranks of one host read each other's device memory.
//!
//! | file | what it has |
//! |---|---|
//! | `rank` | [`Ipc`]: a rank's side, one operation, the end |
//! | `connect` | how ranks come to share memory: windows, larger ones when they are needed |
//! | `verbs` | the verbs by windows |
//! | `between` | all_reduce over several hosts: windows inside, messages of the host between |
//! | `shared` | what the ranks of a host share, as one of them has it |
//! | `windows` | memory and events that are shared |
//! | `told` | what the ranks tell each other for that |
//! | `book` | who has memory of others open |
//!
//! Each rank has two windows of memory of its own, which the others open once. Arrays are copied into a window, range by range, and the
//! others read them there. Only that memory is shared: the driver shares no memory of torch's expandable segments, and what is open outlives
//! its owner's freeing.
//!
//! No kernel waits for another rank: ranks that share a device have it by turns. Streams wait for shared events. A wait is for the newest
//! record at its call, so that a record must come before the other rank's wait, and the next record of the same event after it. The host's
//! barriers see to both; they wait for no device. For range k, in window k % 2:
//!
//! 1. fill (waits for every rank's `free` of range k - 2), record `filled`;
//! 2. barrier;
//! 3. fill range k + 1, in the other window;
//! 4. wait for the others' `filled`, and read. all_reduce and reduce: reduce an own share, record `made`, barrier, wait for the others' `made`
//!    and read their shares;
//! 5. record `free`.
//!
//! `free` of range k - 2 was recorded before the barrier of range k - 1, behind which range k is filled. `filled` of range k is waited for
//! before the barrier of range k + 1, behind which it is recorded again. The ranges of operations are counted on, so that the same holds from
//! one to the next.

mod between;
mod book;
mod connect;
mod rank;
mod shared;
mod told;
mod verbs;
mod windows;

pub(crate) use self::connect::Ranks;
pub(crate) use self::rank::Ipc;
