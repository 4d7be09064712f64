//! What the ranks tell each other before they share memory: names of memory and events, or why there are none.

use bagua_core::collective::{Collective, Io, OpContext, Verb};
use bagua_core::error::Result;

use super::windows::{EVENTS, Names};
use crate::api::IpcHandle;

/// Bytes that each rank tells: a whole number of elements of any type.
const RECORD: usize = 1024;

/// Where the names begin in a record: of memory, then of events.
const NAMES: usize = 64;

/// Where the reason begins.
const REASON: usize = NAMES + 64 * (1 + EVENTS);

/// What a rank tells the others: names, or in one line why it has none.
pub(super) type Told = std::result::Result<Names, String>;

/// For the other ranks. A reason that is too long is cut off.
fn to_record(told: &Told) -> [u8; RECORD] {
    let mut record = [0; RECORD];
    match told {
        Ok(names) => {
            record[0] = 1;
            record[4..8].copy_from_slice(&names.process.to_le_bytes());
            record[8..12].copy_from_slice(&names.book.to_le_bytes());
            let all = std::iter::once(&names.memory).chain(&names.events);
            for (place, name) in record[NAMES..REASON].chunks_exact_mut(64).zip(all) {
                place.copy_from_slice(&name.0);
            }
        }
        Err(reason) => {
            let mut end = reason.len().min(RECORD - REASON);
            while !reason.is_char_boundary(end) {
                end -= 1;
            }
            record[REASON..REASON + end].copy_from_slice(&reason.as_bytes()[..end]);
        }
    }
    record
}

/// Of a record, of [`RECORD`] bytes.
fn from_record(record: &[u8]) -> Told {
    if record[0] == 0 {
        let reason = record[REASON..].split(|byte| *byte == 0).next().unwrap_or_default();
        return Err(String::from_utf8_lossy(reason).into_owned());
    }
    let number = |at: usize| <[u8; 4]>::try_from(&record[at..at + 4]).expect("four");
    let name = |nth: usize| {
        let at = NAMES + 64 * nth;
        IpcHandle(<[u8; 64]>::try_from(&record[at..at + 64]).expect("sixty-four"))
    };
    Ok(Names {
        process: u32::from_le_bytes(number(4)),
        book: i32::from_le_bytes(number(8)),
        memory: name(0),
        events: std::array::from_fn(|nth| name(1 + nth)),
    })
}

/// All ranks tell each other, over the host's collective. The names of all, or the reason of the first rank that is not ready.
///
/// # Errors
/// Those of the host's collective.
pub(super) fn tell(
    inner: &mut dyn Collective,
    cx: &OpContext<'_>,
    own: &Told,
) -> Result<std::result::Result<Vec<Names>, String>> {
    let ranks = inner.size();
    let mut all = vec![0; ranks * RECORD];
    inner.run(cx, Verb::AllGather, Io::split(&to_record(own), &mut all))?;
    let on = |rank: usize| if ranks > 1 { format!(" (rank {rank} of the group)") } else { String::new() };
    let each = all.chunks(RECORD).map(from_record).enumerate();
    Ok(each.map(|(rank, told)| told.map_err(|reason| format!("{reason}{}", on(rank)))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_has_what_a_rank_tells() {
        let names = Names {
            process: 77,
            book: 5,
            memory: IpcHandle([3; 64]),
            events: std::array::from_fn(|nth| IpcHandle([nth as u8 + 10; 64])),
        };
        assert_eq!(from_record(&to_record(&Ok(names.clone()))), Ok(names));
        assert_eq!(from_record(&to_record(&Err("why not".to_owned()))), Err("why not".to_owned()));
        let cut = from_record(&to_record(&Err("ä".repeat(RECORD))));
        assert_eq!(cut, Err("ä".repeat((RECORD - REASON) / 2)));
    }
}
