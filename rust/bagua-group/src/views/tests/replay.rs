//! One rank's agreement, driven by bytes from the fuzzer of the group's parsers.

use super::super::super::wire::Encoding;
use super::super::action::Action;
use super::super::agreement::{Agreement, Gone, Quorum};
use super::super::message::{Endpoint, ViewMessage};

/// Ranks of the group.
const SIZE: usize = 4;

/// The listener of this rank.
pub(in super::super::super) const ENDPOINT: Endpoint = Endpoint { port: 9, unix: true };

/// The event after which this rank cannot listen.
const UNABLE: u8 = 0x1f;

/// Drives the agreement of rank 1 by a sequence of events. An event is a byte with its kind. If the event is a message,
/// its length (u32) and its bytes follow. Bytes that are not an event end the sequence.
///
/// Returns the number of messages that were parsed.
pub(in super::super::super) fn replay(mut bytes: &[u8]) -> usize {
    let (mut agreement, mut out, mut parsed) = (Agreement::new(1, SIZE, 1), Vec::new(), 0);
    agreement.call(Quorum::Majority, &mut out);
    settle(&mut agreement, &mut out, 0);
    while let Some((&what, rest)) = bytes.split_first() {
        bytes = rest;
        let rank = usize::from(what & 7);
        match what >> 4 {
            0 => agreement.lost([(rank % SIZE, Gone::Ended)], &mut out),
            1 => agreement.lost([(rank % SIZE, Gone::Silent)], &mut out),
            2 => agreement.expire(what & 1 == 1, &mut out),
            3 => agreement.exclude(rank % SIZE, &mut out),
            _ => {
                let Some((len, rest)) = bytes.split_first_chunk() else { break };
                let Some((body, rest)) = rest.split_at_checked(u32::from_le_bytes(*len) as usize) else { break };
                bytes = rest;
                // A message that is malformed ends the connection.
                match ViewMessage::parse(body) {
                    Ok(message) => {
                        parsed += 1;
                        agreement.received(rank, message, &mut out);
                    }
                    Err(_) => agreement.lost([(rank % SIZE, Gone::Silent)], &mut out),
                }
            }
        }
        settle(&mut agreement, &mut out, what);
    }
    parsed
}

/// Returns this rank's listener, or an error if `how` is [`UNABLE`].
fn listen(how: u8) -> Result<Endpoint, String> {
    if how == UNABLE { Err(String::new()) } else { Ok(ENDPOINT) }
}

/// Performs the actions. `how` decides how each of them ends.
fn settle(agreement: &mut Agreement, out: &mut Vec<Action>, how: u8) {
    // More rounds than any event causes: a refusal ends the call, and the next one is made once.
    for _ in 0..16 {
        for action in std::mem::take(out) {
            match action {
                Action::SayLater => agreement.say(|_| listen(how), out),
                Action::Build { .. } if how & 8 == 0 => agreement.failed(how & 1 == 1, "", out),
                Action::Build { .. } => agreement.passed(out),
                Action::Finish(_) if how & 4 == 0 => agreement.call(Quorum::Majority, out),
                Action::Finish(_) | Action::Send(..) | Action::Publish(_) | Action::Cancel(_) | Action::Abandon => {}
            }
        }
        if out.is_empty() {
            return;
        }
    }
    out.clear();
}
