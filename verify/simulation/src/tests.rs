use tokio::io::{AsyncReadExt, AsyncWriteExt};

use replay_link::stack::until;

use super::*;

fn address() -> Address {
    "innet://server:1".parse().unwrap()
}

/// Sends `bytes` to a server that answers with what it read, until its end or an error.
fn echo(seed: u64, bytes: Vec<u8>, cut_after: Option<usize>) -> (io::Result<Vec<u8>>, Duration) {
    let sim = Sim::new(seed);
    let stack = sim.stack();
    let mut listener = stack.listen(&address()).unwrap();
    let start = stack.now();
    stack.spawn({
        let stack = stack.clone();
        async move {
            let (stream, _) = stack.accept(&mut listener).await.unwrap();
            let (mut read, mut write) = tokio::io::split(stream);
            // The copy ends with the connection; what it moved is what the client checks.
            let _ = tokio::io::copy(&mut read, &mut write).await;
            let _ = write.shutdown().await;
        }
    });
    let read = sim.run({
        let stack = stack.clone();
        async move {
            let stream = stack.connect(&address()).unwrap();
            if let Some(bytes) = cut_after {
                stream.link().cut_after_sent(bytes);
            }
            let (mut read, mut write) = tokio::io::split(stream);
            stack.spawn(async move {
                let _ = write.write_all(&bytes).await;
                let _ = write.shutdown().await;
            });
            let mut answer = Vec::new();
            read.read_to_end(&mut answer).await.map(|_| answer)
        }
    });
    (read, stack.now() - start)
}

#[test]
fn bytes_arrive_in_order_and_a_seed_repeats() {
    let bytes: Vec<u8> = (0..300_000u32).map(|i| (i * 7) as u8).collect();
    for seed in 0..5 {
        let (answer, took) = echo(seed, bytes.clone(), None);
        assert!(answer.unwrap() == bytes);
        assert!(took > Duration::ZERO);
        assert_eq!(took, echo(seed, bytes.clone(), None).1);
    }
}

#[test]
fn a_cut_resets_both_ends() {
    let (answer, _) = echo(1, vec![1; 1000], Some(500));
    assert_eq!(answer.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
}

#[test]
fn a_held_link_is_silent_until_it_is_released() {
    let sim = Sim::new(3);
    let stack = sim.stack();
    let mut listener = stack.listen(&address()).unwrap();
    sim.run(async move {
        let mut client = stack.connect(&address()).unwrap();
        let (mut server, _) = stack.accept(&mut listener).await.unwrap();
        client.link().hold();
        client.write_all(b"hello").await.unwrap();
        let mut buffer = [0; 5];
        let minute = stack.now() + Duration::from_secs(60);
        let read = until(&stack, minute, server.read_exact(&mut buffer)).await;
        assert!(read.is_none());
        client.link().release();
        server.read_exact(&mut buffer).await.unwrap();
        assert_eq!(&buffer, b"hello");
    });
}

#[test]
fn a_full_connection_makes_its_writer_wait() {
    let sim = Sim::new(4);
    let stack = sim.stack();
    stack.set_buffer(100);
    let mut listener = stack.listen(&address()).unwrap();
    sim.run(async move {
        let mut client = stack.connect(&address()).unwrap();
        let (mut server, _) = stack.accept(&mut listener).await.unwrap();
        let minute = stack.now() + Duration::from_secs(60);
        let written = until(&stack, minute, client.write_all(&[0; 101])).await;
        assert!(written.is_none());
        let mut buffer = [0; 100];
        server.read_exact(&mut buffer).await.unwrap();
        client.write_all(&[0; 100]).await.unwrap();
    });
}

#[test]
fn a_paused_program_stands_still_and_a_jump_makes_timers_late() {
    let sim = Sim::new(1);
    let stack = sim.stack();
    sim.run(async move {
        let (start, program) = (stack.now(), stack.program());
        let second = Duration::from_secs(1);
        let ticks = Rc::new(RefCell::new(Vec::new()));
        program.spawn({
            let (program, ticks) = (program.clone(), ticks.clone());
            async move {
                loop {
                    program.sleep(second).await;
                    ticks.borrow_mut().push((program.now() - start).as_secs());
                }
            }
        });
        stack.sleep(second * 5 / 2).await;
        stack.pause(&program);
        stack.sleep(second * 5).await;
        assert_eq!(*ticks.borrow(), [1, 2]);
        stack.resume(&program);
        stack.sleep(second * 3 / 2).await;
        assert_eq!(*ticks.borrow(), [1, 2, 7, 8]);
        stack.jump(second * 10);
        stack.sleep(second * 3 / 2).await;
        assert_eq!(*ticks.borrow(), [1, 2, 7, 8, 19, 20]);
        stack.kill(&program);
    });
}

#[test]
fn what_is_there_is_taken_after_its_deadline() {
    let sim = Sim::new(6);
    let stack = sim.stack();
    sim.run(async move {
        let second = Duration::from_secs(1);
        let answered = until(&stack, stack.now() + second * 3, stack.sleep(second));
        let jumped = stack.clone();
        stack.spawn(async move { jumped.jump(second * 10) });
        assert_eq!(answered.await, Some(()), "the answer and its deadline come at one instant");
    });
}

#[test]
fn a_write_to_a_full_connection_may_return_zero() {
    let sim = Sim::new(7);
    let stack = sim.stack();
    stack.set_buffer(100);
    stack.set_returns_zero(true);
    let _listener = stack.listen(&address()).unwrap();
    sim.run(async move {
        let mut client = stack.connect(&address()).unwrap();
        client.write_all(&[0; 100]).await.unwrap();
        let mut waited = 0;
        loop {
            let end = stack.now() + Duration::from_millis(1);
            match until(&stack, end, client.write(&[0])).await {
                None => waited += 1,
                Some(written) => break assert_eq!(written.unwrap(), 0),
            }
            assert!(waited < 1_000, "it never returns");
        }
    });
}

#[test]
fn nobody_listens_where_the_listener_is_gone() {
    let sim = Sim::new(5);
    let stack = sim.stack();
    let listener = stack.listen(&address()).unwrap();
    assert!(stack.listen(&address()).is_err());
    stack.connect(&address()).unwrap();
    drop(listener);
    let error = stack.connect(&address()).err().unwrap();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
}
