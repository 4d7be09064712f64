//! Which collective the ranks of a lane choose for arrays on devices, by what each tells of itself: the same on all of them.

use bagua_core::error::{Error, Result};

use crate::device::Wish;
use crate::kernels::MAX_SOURCES;
use crate::nccl::version_text;
use crate::stage::{Choice, HIER, IPC, STAGED};

/// Name of the collective by NCCL.
pub(crate) const NCCL: &str = "nccl";

/// The oldest NCCL that lets several ranks use one device, where NCCL_MULTI_RANK_GPU_ENABLE=1 is set.
const SEVERAL: i32 = 23000;

/// Bytes that each rank tells of itself: a whole number of elements of any type.
pub(crate) const RECORD: usize = 512;

/// Where the reason begins in a record.
const REASON: usize = 32;

/// What a rank tells of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Candidate {
    /// What its caller wants.
    pub(crate) wish: Wish,
    /// The version of its NCCL, as that counts; 0 where it cannot be used.
    pub(crate) nccl: i32,
    /// `NCCL_MULTI_RANK_GPU_ENABLE=1`.
    pub(crate) several: bool,
    /// Identifier of its device.
    pub(crate) uuid: Option<[u8; 16]>,
    /// Why NCCL cannot be used, in one line.
    pub(crate) reason: String,
}

impl Candidate {
    /// For the other ranks. A reason that is too long is cut off.
    pub(crate) fn to_record(&self) -> [u8; RECORD] {
        let mut record = [0; RECORD];
        record[0] = self.wish as u8;
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

    /// Of a record, of [`RECORD`] bytes.
    pub(crate) fn from_record(record: &[u8]) -> Candidate {
        let bytes = |at: usize| <[u8; 16]>::try_from(&record[at..at + 16]).expect("sixteen");
        let version = <[u8; 4]>::try_from(&record[4..8]).expect("four");
        let reason = record[REASON..].split(|byte| *byte == 0).next().unwrap_or_default();
        Candidate {
            wish: Wish::ALL.get(usize::from(record[0])).copied().unwrap_or_default(),
            several: record[1] != 0,
            uuid: (record[2] != 0).then(|| bytes(8)),
            nccl: i32::from_le_bytes(version),
            reason: String::from_utf8_lossy(reason).into_owned(),
        }
    }
}

/// Where the ranks of a group are.
pub(crate) struct Hosts<'a> {
    /// The ranks of each host.
    pub(crate) ranks: &'a [Vec<usize>],
    /// The host's collective works inside hosts first, and between them then.
    pub(crate) hierarchical: bool,
}

/// What combines arrays on devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Host memory.
    Staged,
    /// A communicator of all ranks.
    Nccl,
    /// A communicator for each host that has several ranks, and host memory between hosts.
    NcclInHosts,
    /// Memory that the ranks of a host share, and host memory between hosts.
    Ipc,
}

/// What the ranks have chosen.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Chosen {
    pub(crate) way: Way,
    /// As users are told.
    pub(crate) choice: Choice,
}

impl Chosen {
    fn new(way: Way, collective: &'static str, why: String) -> Chosen {
        Chosen { way, choice: Choice { collective, why } }
    }
}

/// What the ranks choose, as far as they know it by what each tells of itself.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// This one.
    Settled(Chosen),
    /// What [`by_ipc`] says, if the ranks can share memory; else what [`without_ipc`] says. What led to it.
    IfShared(String),
}

/// What all ranks choose.
///
/// # Errors
/// `Unavailable` for wishes that differ or cannot be served.
pub(crate) fn choose(candidates: &[Candidate], hosts: &Hosts<'_>) -> Result<Found> {
    let wish = candidates[0].wish;
    if let Some(rank) = candidates.iter().position(|candidate| candidate.wish != wish) {
        return Err(Error::Unavailable(format!(
            "BAGUA_CUDA_COLLECTIVE is {} on rank 0 of the group and {} on rank {rank}",
            wish.name(),
            candidates[rank].wish.name()
        )));
    }
    let all: Vec<usize> = (0..candidates.len()).collect();
    let why = match wish {
        Wish::Staged => return Ok(Found::Settled(Chosen::new(Way::Staged, STAGED, wanted(wish)))),
        Wish::Ipc => wanted(wish),
        Wish::Nccl | Wish::Auto => match (why_not_nccl(candidates, &all, hosts.ranks), wish) {
            (Some(reason), Wish::Nccl) => return Err(Error::Unavailable(format!("{}: {reason}", wanted(wish)))),
            (Some(reason), _) => format!("auto: {reason}"),
            (None, Wish::Nccl) => return Ok(Found::Settled(Chosen::new(Way::Nccl, NCCL, wanted(wish)))),
            (None, _) => {
                let why = format!("auto: NCCL {} on all ranks", version_text(candidates[0].nccl));
                return Ok(Found::Settled(Chosen::new(Way::Nccl, NCCL, why)));
            }
        },
    };
    match why_not_ipc(hosts) {
        Some(reason) => without_ipc(candidates, hosts, &why, &reason).map(Found::Settled),
        None => Ok(Found::IfShared(why)),
    }
}

/// What ranks choose that share memory. `why` is what led to that.
pub(crate) fn by_ipc(hosts: &Hosts<'_>, why: String) -> Chosen {
    match hosts.ranks.len() {
        1 => Chosen::new(Way::Ipc, IPC, why),
        hosts => Chosen::new(Way::Ipc, HIER, format!("{why}; ipc inside the {hosts} hosts, staged between")),
    }
}

/// What ranks choose that cannot share memory, for a `reason` that all of them know. `why` is what led to ipc.
///
/// # Errors
/// `Unavailable` where nothing else is wanted.
pub(crate) fn without_ipc(candidates: &[Candidate], hosts: &Hosts<'_>, why: &str, reason: &str) -> Result<Chosen> {
    let wish = candidates[0].wish;
    if wish != Wish::Auto {
        return Err(Error::Unavailable(format!("{}: {reason}", wanted(wish))));
    }
    let why = format!("{why}; {reason}");
    let number = hosts.ranks.len();
    if number == 1 || why_not_over_hosts(hosts).is_some() {
        return Ok(Chosen::new(Way::Staged, STAGED, why));
    }
    let mut several = hosts.ranks.iter().filter(|host| host.len() > 1);
    Ok(match several.find_map(|host| why_not_nccl(candidates, host, std::slice::from_ref(host))) {
        None => {
            let why = format!("{why}; nccl inside the {number} hosts, staged between");
            Chosen::new(Way::NcclInHosts, HIER, why)
        }
        // It may be the reason against one communicator of all ranks.
        Some(reason) if why.contains(&reason) => Chosen::new(Way::Staged, STAGED, why),
        Some(reason) => Chosen::new(Way::Staged, STAGED, format!("{why}; {reason}")),
    })
}

fn wanted(wish: Wish) -> String {
    format!("BAGUA_CUDA_COLLECTIVE={}", wish.name())
}

/// Why ranks do not even try to share memory; `None` where they do.
fn why_not_ipc(hosts: &Hosts<'_>) -> Option<String> {
    let ranks = hosts.ranks;
    if let Some(host) = ranks.iter().find(|host| host.len() > MAX_SOURCES) {
        return Some(format!("a host has {} ranks, and ipc serves up to {MAX_SOURCES}", host.len()));
    }
    why_not_over_hosts(hosts)
}

/// Why ranks do not work inside their hosts first; `None` where they do, and for one host.
fn why_not_over_hosts(hosts: &Hosts<'_>) -> Option<String> {
    let ranks = hosts.ranks;
    if ranks.len() > 1 && ranks.iter().all(|host| host.len() == 1) {
        return Some("no two ranks of the group share a host".to_owned());
    }
    if ranks.len() > 1 && !hosts.hierarchical {
        return Some("the group's route between hosts is flat, which hier has no way for".to_owned());
    }
    None
}

/// Why NCCL cannot serve these ranks, which are those of `hosts`; `None` where it can.
fn why_not_nccl(candidates: &[Candidate], ranks: &[usize], hosts: &[Vec<usize>]) -> Option<String> {
    let on = |rank: usize| if candidates.len() > 1 { format!(" (rank {rank} of the group)") } else { String::new() };
    let first = ranks[0];
    let version = candidates[first].nccl;
    for rank in ranks {
        let candidate = &candidates[*rank];
        if candidate.nccl == 0 {
            return Some(format!("{}{}", candidate.reason, on(*rank)));
        }
        if candidate.nccl != version {
            let (one, other) = (version_text(version), version_text(candidate.nccl));
            return Some(format!("NCCL is {one} on rank {first} of the group and {other} on rank {rank}"));
        }
    }
    if version >= SEVERAL && ranks.iter().all(|rank| candidates[*rank].several) {
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
        let hosts = Hosts { ranks, hierarchical: ranks.len() > 1 };
        let found = choose(candidates, &hosts).map_err(|error| error.to_string())?;
        let chosen = match found {
            Found::Settled(chosen) => chosen,
            Found::IfShared(why) => by_ipc(&hosts, why),
        };
        Ok((chosen.choice.collective, chosen.choice.why))
    }

    #[test]
    fn a_record_tells_what_a_rank_is() {
        let long = "ä".repeat(RECORD);
        let candidate = Candidate { wish: Wish::Ipc, several: true, reason: long, ..able(7) };
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
        assert_eq!((collective, &*why), ("ipc", "auto: ranks 0 and 2 of the group have the same device"));
        // The same device number on two hosts is two devices.
        assert_eq!(over(&[able(0), able(0)], &[vec![0], vec![1]]).unwrap().0, "nccl");
        let unknown = Candidate { uuid: None, ..able(0) };
        assert_eq!(on_one_host(&[unknown.clone(), able(1)]).unwrap().0, "ipc");
        assert_eq!(on_one_host(&[unknown]).unwrap().0, "nccl");
    }

    #[test]
    fn several_ranks_share_a_device_where_all_of_them_and_the_version_allow_it() {
        let sharing = |nccl| Candidate { nccl, several: true, ..able(0) };
        assert_eq!(on_one_host(&[sharing(23000), sharing(23000)]).unwrap().0, "nccl");
        assert_eq!(on_one_host(&[sharing(22999), sharing(22999)]).unwrap().0, "ipc");
        let alone = Candidate { several: false, ..sharing(23000) };
        assert_eq!(on_one_host(&[sharing(23000), alone]).unwrap().0, "ipc");
    }

    #[test]
    fn a_wish_that_cannot_be_served_says_why() {
        let wish = |wish, candidate| Candidate { wish, ..candidate };
        let none = Candidate { reason: "NCCL 2.18.3 is too old".to_owned(), ..Candidate::default() };
        let error = on_one_host(&[wish(Wish::Nccl, able(0)), wish(Wish::Nccl, none.clone())]).unwrap_err();
        assert_eq!(error, "BAGUA_CUDA_COLLECTIVE=nccl: NCCL 2.18.3 is too old (rank 1 of the group)");
        assert_eq!(on_one_host(std::slice::from_ref(&none)).unwrap().1, "auto: NCCL 2.18.3 is too old");
        let newer = Candidate { nccl: 23000, ..able(1) };
        let error = on_one_host(&[wish(Wish::Nccl, able(0)), wish(Wish::Nccl, newer)]).unwrap_err();
        assert!(error.ends_with("NCCL is 2.27.3 on rank 0 of the group and 2.30.0 on rank 1"), "{error}");
        let error = on_one_host(&[able(0), able(1), wish(Wish::Staged, able(2))]).unwrap_err();
        assert_eq!(error, "BAGUA_CUDA_COLLECTIVE is auto on rank 0 of the group and staged on rank 2");
    }

    #[test]
    fn ranks_share_memory_inside_hosts_where_some_host_has_several() {
        let ipc = |count: usize| vec![Candidate { wish: Wish::Ipc, ..able(0) }; count];
        assert_eq!(on_one_host(&ipc(2)).unwrap(), ("ipc", "BAGUA_CUDA_COLLECTIVE=ipc".to_owned()));
        let (collective, why) = over(&ipc(3), &[vec![0, 1], vec![2]]).unwrap();
        let text = "BAGUA_CUDA_COLLECTIVE=ipc; ipc inside the 2 hosts, staged between";
        assert_eq!((collective, &*why), ("hier", text));
        let error = over(&ipc(2), &[vec![0], vec![1]]).unwrap_err();
        assert_eq!(error, "BAGUA_CUDA_COLLECTIVE=ipc: no two ranks of the group share a host");
        let error = on_one_host(&ipc(9)).unwrap_err();
        assert_eq!(error, "BAGUA_CUDA_COLLECTIVE=ipc: a host has 9 ranks, and ipc serves up to 8");
        let flat = Hosts { ranks: &[vec![0, 1], vec![2]], hierarchical: false };
        assert!(choose(&ipc(3), &flat).unwrap_err().to_string().contains("is flat"));
    }

    #[test]
    fn what_the_ranks_take_instead_has_both_reasons() {
        let (collective, why) = on_one_host(&vec![able(0); 9]).unwrap();
        assert_eq!(collective, "staged");
        let text = "auto: ranks 0 and 1 of the group have the same device; a host has 9 ranks, and ipc serves up to 8";
        assert_eq!(why, text);
        let hosts = Hosts { ranks: &[vec![0, 1]], hierarchical: false };
        let chosen = without_ipc(&[able(0), able(1)], &hosts, "auto: one", "two").unwrap();
        assert_eq!(chosen, Chosen::new(Way::Staged, "staged", "auto: one; two".to_owned()));
        let wish = [Candidate { wish: Wish::Ipc, ..able(0) }];
        let error = without_ipc(&wish, &hosts, "", "two").unwrap_err();
        assert_eq!(error.to_string(), "BAGUA_CUDA_COLLECTIVE=ipc: two");
    }

    const TWO_AND_TWO: [[usize; 2]; 2] = [[0, 1], [2, 3]];

    /// What ranks of two hosts of two choose that cannot share memory.
    fn unshared(candidates: &[Candidate]) -> (bool, String) {
        let ranks = TWO_AND_TWO.map(Vec::from);
        let hosts = Hosts { ranks: &ranks, hierarchical: true };
        assert!(matches!(choose(candidates, &hosts), Ok(Found::IfShared(_))), "they try it first");
        let Chosen { way, choice } = without_ipc(candidates, &hosts, "auto: one", "two").unwrap();
        let inside = way == Way::NcclInHosts;
        assert_eq!((way, choice.collective), if inside { (way, "hier") } else { (Way::Staged, "staged") });
        (inside, choice.why)
    }

    fn versions(versions: [i32; 4]) -> Vec<Candidate> {
        let of = |(rank, nccl): (usize, i32)| Candidate { nccl, ..able(rank as u8 % 2) };
        versions.into_iter().enumerate().map(of).collect()
    }

    #[test]
    fn nccl_serves_inside_hosts_what_has_one_version_on_each_of_them() {
        let mixed = versions([22703, 22703, 23000, 23000]);
        let text = "auto: one; two; nccl inside the 2 hosts, staged between";
        assert_eq!(unshared(&mixed), (true, text.to_owned()));
        let text = "auto: one; two; NCCL is 2.27.3 on rank 2 of the group and 2.30.0 on rank 3";
        assert_eq!(unshared(&versions([22703, 22703, 22703, 23000])), (false, text.to_owned()));
        let mut absent = mixed.clone();
        absent[3] = Candidate { reason: "gone".to_owned(), ..Candidate::default() };
        assert_eq!(unshared(&absent), (false, "auto: one; two; gone (rank 3 of the group)".to_owned()));
    }

    #[test]
    fn nccl_inside_hosts_needs_a_device_for_each_rank_of_a_host_or_a_version_that_shares_them() {
        let mut twins = versions([22703, 22703, 23000, 23000]);
        twins[3].uuid = twins[2].uuid;
        let text = "auto: one; two; ranks 2 and 3 of the group have the same device";
        assert_eq!(unshared(&twins), (false, text.to_owned()));
        (twins[2].several, twins[3].several) = (true, true);
        assert!(unshared(&twins).0);
        // The version of the other host does not matter, that of this one does.
        (twins[2].nccl, twins[3].nccl) = (22900, 22900);
        assert!(!unshared(&twins).0);
    }

    #[test]
    fn nccl_inside_hosts_comes_after_ipc_and_names_all_reasons() {
        let many: Vec<_> = (0..11).map(|rank| Candidate { nccl: 22703 + i32::from(rank > 8), ..able(rank) }).collect();
        let ranks = [(0..9).collect(), vec![9, 10]];
        let (collective, why) = over(&many, &ranks).unwrap();
        let text = "auto: NCCL is 2.27.3 on rank 0 of the group and 2.27.4 on rank 9; \
            a host has 9 ranks, and ipc serves up to 8; nccl inside the 2 hosts, staged between";
        assert_eq!((collective, &*why), ("hier", text));
        // A rank that is alone on its host needs no NCCL.
        let mut alone = many[..10].to_vec();
        alone[9] = Candidate { reason: "gone".to_owned(), ..Candidate::default() };
        assert_eq!(over(&alone, &[(0..9).collect(), vec![9]]).unwrap().0, "hier");
        let flat = Hosts { ranks: &ranks, hierarchical: false };
        assert!(matches!(choose(&many, &flat), Ok(Found::Settled(chosen)) if chosen.way == Way::Staged));
        // A reason against one communicator of all ranks that holds inside a host too is in `why` once.
        let mut twins = many;
        twins[1].uuid = twins[0].uuid;
        twins[9].nccl = 22703;
        twins[10].nccl = 22703;
        let why = over(&twins, &ranks).unwrap().1;
        assert_eq!(
            why,
            "auto: ranks 0 and 1 of the group have the same device; a host has 9 ranks, and ipc serves up to 8"
        );
    }

    #[test]
    fn a_wish_for_nccl_is_not_served_by_nccl_inside_hosts_only() {
        let mut mixed = versions([22703, 22703, 23000, 23000]);
        mixed.iter_mut().for_each(|candidate| candidate.wish = Wish::Nccl);
        let error = over(&mixed, &TWO_AND_TWO.map(Vec::from)).unwrap_err();
        assert_eq!(error, "BAGUA_CUDA_COLLECTIVE=nccl: NCCL is 2.27.3 on rank 0 of the group and 2.30.0 on rank 2");
    }
}
