//! The choice among collectives for arrays on devices. It depends only on one record per rank, so all ranks agree.

use bagua_core::error::{Error, Result};

use crate::device::Requested;
use crate::device_lane::{Choice, STAGED};
use crate::nccl::version_text;

pub(crate) const NCCL: &str = "nccl";

/// The oldest NCCL that lets several ranks use one device if NCCL_MULTI_RANK_GPU_ENABLE=1 is set.
const SEVERAL: i32 = 23000;

/// Size in bytes of the record that each rank sends: a whole number of elements of any type.
pub(crate) const RECORD: usize = 512;

/// Offset of the reason for not using NCCL in a record.
const REASON: usize = 32;

/// The content of a rank's record.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub(crate) requested: Requested,
    /// Version number of the rank's NCCL, or 0 if NCCL cannot be used.
    pub(crate) nccl: i32,
    pub(crate) several: bool,
    pub(crate) uuid: Option<[u8; 16]>,
    /// Reason why NCCL cannot be used, in one line.
    pub(crate) reason: String,
}

impl Candidate {
    /// Encodes the record for the other ranks. A reason that is too long is cut off.
    pub(crate) fn to_record(&self) -> [u8; RECORD] {
        let mut record = [0; RECORD];
        record[0] = self.requested as u8;
        record[1] = self.several.into();
        record[2] = self.uuid.is_some().into();
        record[4..8].copy_from_slice(&self.nccl.to_le_bytes());
        record[8..24].copy_from_slice(&self.uuid.unwrap_or_default());
        let mut end = self.reason.len().min(RECORD - REASON);
        while !self.reason.is_char_boundary(end) {
            end -= 1;
        }
        record[REASON..REASON + end].copy_from_slice(&self.reason.as_bytes()[..end]);
        record
    }

    pub(crate) fn from_record(record: &[u8]) -> Candidate {
        let bytes = |at: usize| <[u8; 16]>::try_from(&record[at..at + 16]).expect("sixteen");
        let version = <[u8; 4]>::try_from(&record[4..8]).expect("four");
        let reason = record[REASON..].split(|byte| *byte == 0).next().unwrap_or_default();
        Candidate {
            requested: Requested::from_code(record[0]).unwrap_or_default(),
            several: record[1] != 0,
            uuid: (record[2] != 0).then(|| bytes(8)),
            nccl: i32::from_le_bytes(version),
            reason: String::from_utf8_lossy(reason).into_owned(),
        }
    }
}

/// Returns the choice of all ranks, which are on `hosts`. Fails with `Unavailable` if the ranks request different
/// collectives, or one that they cannot use.
pub(crate) fn choose(candidates: &[Candidate], hosts: &[Vec<usize>]) -> Result<Choice> {
    let requested = candidates[0].requested;
    if let Some(rank) = candidates.iter().position(|candidate| candidate.requested != requested) {
        return Err(Error::Unavailable(format!(
            "BAGUA_CUDA_COLLECTIVE is {} on rank 0 of the group and {} on rank {rank}; all ranks need the same value",
            requested.name(),
            candidates[rank].requested.name()
        )));
    }
    let prevents = match requested {
        Requested::Staged => return Ok(Choice { collective: STAGED, why: wanted(requested) }),
        Requested::Nccl | Requested::Auto => why_not_nccl(candidates, hosts),
    };
    match (prevents, requested) {
        (Some(reason), Requested::Auto) => Ok(Choice { collective: STAGED, why: format!("auto: {reason}") }),
        (Some(reason), _) => Err(Error::Unavailable(format!("{}: {reason}", wanted(requested)))),
        (None, Requested::Auto) => {
            let why = format!("auto: NCCL {} on all ranks", version_text(candidates[0].nccl));
            Ok(Choice { collective: NCCL, why })
        }
        (None, _) => Ok(Choice { collective: NCCL, why: wanted(requested) }),
    }
}

fn wanted(requested: Requested) -> String {
    format!("BAGUA_CUDA_COLLECTIVE={}", requested.name())
}

/// Returns the reason why NCCL cannot serve all ranks, or `None` if it can.
fn why_not_nccl(candidates: &[Candidate], hosts: &[Vec<usize>]) -> Option<String> {
    let on = |rank: usize| if candidates.len() > 1 { format!(" (rank {rank} of the group)") } else { String::new() };
    let version = candidates[0].nccl;
    for (rank, candidate) in candidates.iter().enumerate() {
        if candidate.nccl == 0 {
            return Some(format!("{}{}", candidate.reason, on(rank)));
        }
        if candidate.nccl != version {
            let (one, other) = (version_text(version), version_text(candidate.nccl));
            return Some(format!("NCCL is {one} on rank 0 of the group and {other} on rank {rank}"));
        }
    }
    if version >= SEVERAL && candidates.iter().all(|candidate| candidate.several) {
        return None;
    }
    for host in hosts {
        for (at, rank) in host.iter().enumerate() {
            if candidates[*rank].uuid.is_none() && host.len() > 1 {
                return Some(format!("the driver does not identify the device of rank {rank} of the group"));
            }
            let twin = host[..at].iter().find(|other| candidates[**other].uuid == candidates[*rank].uuid);
            if let Some(other) = twin {
                return Some(format!("ranks {other} and {rank} of the group have the same device"));
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn able(device: u8) -> Candidate {
        Candidate { nccl: 22703, uuid: Some([device; 16]), ..Candidate::default() }
    }

    fn on_one_host(candidates: &[Candidate]) -> std::result::Result<(&'static str, String), String> {
        over(candidates, &[(0..candidates.len()).collect()])
    }

    fn over(candidates: &[Candidate], ranks: &[Vec<usize>]) -> std::result::Result<(&'static str, String), String> {
        let chosen = choose(candidates, ranks).map_err(|error| error.to_string())?;
        Ok((chosen.collective, chosen.why))
    }

    #[test]
    fn a_record_says_what_a_rank_has() {
        let long = "ä".repeat(RECORD);
        let candidate = Candidate { requested: Requested::Staged, several: true, reason: long, ..able(7) };
        let read = Candidate::from_record(&candidate.to_record());
        assert!(candidate.reason.starts_with(&read.reason) && read.reason.len() == RECORD - REASON);
        assert_eq!(read, Candidate { reason: read.reason.clone(), ..candidate });
        let plain = Candidate { reason: "why".to_owned(), ..Candidate::default() };
        assert_eq!(Candidate::from_record(&plain.to_record()), plain);
    }

    #[test]
    fn auto_takes_nccl_where_each_rank_has_a_device_of_its_own() {
        assert_eq!(on_one_host(&[able(0), able(1)]).unwrap(), ("nccl", "auto: NCCL 2.27.3 on all ranks".to_owned()));
        let (collective, why) = on_one_host(&[able(0), able(1), able(0)]).unwrap();
        assert_eq!((collective, &*why), ("staged", "auto: ranks 0 and 2 of the group have the same device"));
        // The same device number on two hosts stands for two devices.
        assert_eq!(over(&[able(0), able(0)], &[vec![0], vec![1]]).unwrap().0, "nccl");
        let unknown = Candidate { uuid: None, ..able(0) };
        assert_eq!(on_one_host(&[unknown.clone(), able(1)]).unwrap().0, "staged");
        assert_eq!(on_one_host(&[unknown]).unwrap().0, "nccl");
    }

    #[test]
    fn several_ranks_share_a_device_where_all_of_them_and_the_version_allow_it() {
        let sharing = |nccl| Candidate { nccl, several: true, ..able(0) };
        assert_eq!(on_one_host(&[sharing(23000), sharing(23000)]).unwrap().0, "nccl");
        assert_eq!(on_one_host(&[sharing(22999), sharing(22999)]).unwrap().0, "staged");
        let alone = Candidate { several: false, ..sharing(23000) };
        assert_eq!(on_one_host(&[sharing(23000), alone]).unwrap().0, "staged");
    }

    #[test]
    fn a_requested_collective_that_cannot_be_used_is_an_error_with_its_reason() {
        let requesting = |requested, candidate| Candidate { requested, ..candidate };
        let none = Candidate { reason: "NCCL 2.18.3 is too old".to_owned(), ..Candidate::default() };
        let error = on_one_host(&[requesting(Requested::Nccl, able(0)), requesting(Requested::Nccl, none.clone())])
            .unwrap_err();
        assert_eq!(error, "BAGUA_CUDA_COLLECTIVE=nccl: NCCL 2.18.3 is too old (rank 1 of the group)");
        assert_eq!(on_one_host(std::slice::from_ref(&none)).unwrap().1, "auto: NCCL 2.18.3 is too old");
        let newer = Candidate { nccl: 23000, ..able(1) };
        let error =
            on_one_host(&[requesting(Requested::Nccl, able(0)), requesting(Requested::Nccl, newer)]).unwrap_err();
        assert!(error.ends_with("NCCL is 2.27.3 on rank 0 of the group and 2.30.0 on rank 1"), "{error}");
        let error = on_one_host(&[able(0), able(1), requesting(Requested::Staged, able(2))]).unwrap_err();
        let text =
            "BAGUA_CUDA_COLLECTIVE is auto on rank 0 of the group and staged on rank 2; all ranks need the same value";
        assert_eq!(error, text);
    }
}
