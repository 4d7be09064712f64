//! Tests that every store has to pass.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::super::tls::Access;
use super::*;

const PATIENCE: Duration = Duration::from_secs(30);

/// Runs a test for each kind of store. Two clients of one store get its two ends.
fn each(test: impl Fn(&str, &dyn Store, &dyn Store)) {
    let access = Access::from(b"secret");
    let server = StoreServer::start("127.0.0.1", 0, &access, None).unwrap();
    let connect = || TcpStore::connect("127.0.0.1", server.address().port(), &access, PATIENCE).unwrap();
    test("tcp", &connect(), &connect());
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let directory = std::env::temp_dir().join(format!("bagua-store-{}-{number}", std::process::id()));
    std::fs::create_dir(&directory).unwrap();
    let open = || FileStore::in_directory(&directory);
    test("files", &open(), &open());
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn a_value_is_what_was_set_last_and_a_new_one_does_not_replace_it() {
    each(|name, one, other| {
        assert_eq!(one.get("a/b"), Ok(None), "{name}");
        one.set("a/b", b"first").unwrap();
        assert_eq!(other.get("a/b"), Ok(Some(b"first".to_vec())), "{name}");
        assert_eq!(other.set_new("a/b", b"second"), Ok(b"first".to_vec()), "{name}");
        other.set("a/b", b"").unwrap();
        assert_eq!(one.get("a/b"), Ok(Some(Vec::new())), "{name}");
        assert_eq!(one.set_new("a%2Fb", b"third"), Ok(b"third".to_vec()), "{name}: another key");
    });
}

#[test]
fn keys_are_listed_by_their_beginning_and_removed_values_are_gone() {
    each(|name, one, other| {
        for key in ["a/2", "a/1", "b%2F", "a"] {
            assert_eq!(one.claim(key, b"value"), Ok(b"value".to_vec()), "{name}");
        }
        let listed = |prefix: &str| other.keys(prefix).unwrap();
        assert_eq!(
            (listed("a/"), listed("")),
            (vec!["a/1".to_owned(), "a/2".to_owned()], ["a", "a/1", "a/2", "b%2F"].map(str::to_owned).to_vec()),
            "{name}"
        );
        other.remove("a/1").unwrap();
        other.remove("a/1").unwrap();
        assert_eq!((one.get("a/1"), listed("a/")), (Ok(None), vec!["a/2".to_owned()]), "{name}");
    });
}

#[test]
fn a_value_is_found_as_soon_as_it_is_set_and_a_search_for_none_ends() {
    each(|name, one, other| {
        std::thread::scope(|scope| {
            let finds = scope.spawn(|| one.find("late", PATIENCE));
            other.set("late", b"here").unwrap();
            assert_eq!(finds.join().unwrap(), Ok(Some(b"here".to_vec())), "{name}");
        });
        other.set("late", b"again").unwrap();
        assert_eq!(one.find("late", PATIENCE), Ok(Some(b"again".to_vec())), "{name}");
        assert_eq!(one.find("never", Duration::from_millis(20)), Ok(None), "{name}");
    });
}

#[test]
fn what_a_client_claimed_on_a_server_ends_with_its_connection() {
    let access = Access::from(b"secret");
    let server = StoreServer::start("127.0.0.1", 0, &access, None).unwrap();
    let connect = || TcpStore::connect("127.0.0.1", server.address().port(), &access, PATIENCE).unwrap();
    let (one, other) = (connect(), connect());
    assert_eq!(one.claim("rank", b"one"), Ok(b"one".to_vec()));
    assert_eq!(other.claim("rank", b"other"), Ok(b"one".to_vec()));
    drop(one);
    assert_eq!(other.find("ended/rank", PATIENCE), Ok(Some(b"one".to_vec())));
    assert_eq!(other.claim("rank", b"other"), Ok(b"other".to_vec()));
    assert_eq!(server.get("ended/rank"), Ok(None));
}

#[test]
fn sums_of_several_clients_lose_nothing_and_are_values() {
    each(|name, one, other| {
        std::thread::scope(|scope| {
            for store in [one, other] {
                scope.spawn(move || (0..50).for_each(|_| _ = store.add("count", 2).unwrap()));
            }
        });
        assert_eq!(one.add("count", -1), Ok(199), "{name}");
        assert_eq!(other.get("count"), Ok(Some(b"199".to_vec())), "{name}");
        one.set("text", b"no number").unwrap();
        assert!(matches!(one.add("text", 1), Err(Error::InvalidArgument(_))), "{name}");
        assert!(matches!(one.add("count", i64::MAX), Err(Error::InvalidArgument(_))), "{name}");
        assert_eq!(one.get("count"), Ok(Some(b"199".to_vec())), "{name}: the store serves on");
    });
}

#[test]
fn a_wait_ends_with_the_last_value_with_the_deadline_or_with_the_failure_of_a_group() {
    each(|name, one, other| {
        one.set("first", b"").unwrap();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| one.wait(&["first", "second"], PATIENCE, &mut || Ok(())));
            other.set("second", b"").unwrap();
            assert_eq!(waits.join().unwrap(), Ok(()), "{name}");
        });
        let late = one.wait(&["first", "third"], Duration::from_millis(30), &mut || Ok(())).unwrap_err();
        assert!(matches!(&late, Error::Timeout { .. }), "{name}: {late}");
        assert!(late.to_string().contains("third") && !late.to_string().contains("first"), "{name}: {late}");
        let mut looks = 0;
        let failed = one.wait(&["third"], PATIENCE, &mut || {
            looks += 1;
            if looks < 3 { Ok(()) } else { Err(Error::Aborted("rank 1 is lost".to_owned())) }
        });
        assert_eq!(failed, Err(Error::Aborted("rank 1 is lost".to_owned())), "{name}");
    });
}

#[test]
fn a_value_or_key_that_no_frame_holds_is_refused_before_it_is_sent() {
    let access = Access::from(b"secret");
    let server = StoreServer::start("127.0.0.1", 0, &access, None).unwrap();
    let store = TcpStore::connect("127.0.0.1", server.address().port(), &access, PATIENCE).unwrap();
    for (key, value) in
        [("key".to_owned(), vec![0; FRAME_LIMIT]), ("k".repeat(super::super::wire::TEXT_LIMIT + 1), Vec::new())]
    {
        assert!(matches!(store.set(&key, &value), Err(Error::InvalidArgument(_))));
    }
    assert_eq!(store.get("key"), Ok(None));
}
