//! The requests that each role's token allows.

use replay_core::replay::{ChangeLease, ReadPosition, ReadSteps};
use replay_core::schema::TableConfig;
use replay_server::config::ServerConfig;
use replay_wire::ErrorCode;
use replay_wire::auth::Secret;
use replay_wire::{Extension, GetParameters, PutParameters, ReportCorrupt, RequestBody, UpdatePriorities};

use super::*;

const OPERATOR: &str = "token of the operator";
pub(super) const LEARNER: &str = "token of the learners";
pub(super) const ACTOR: &str = "token of the actors";

/// The server, with a token for each role.
pub(super) fn with_roles(config: ServerConfig) -> ServerConfig {
    let secret = |token: &str| Some(Secret(token.to_owned()));
    ServerConfig { token: secret(OPERATOR), learner_token: secret(LEARNER), actor_token: secret(ACTOR), ..config }
}

/// A client with the token of a role.
pub(super) async fn as_role(world: &World, token: &str) -> TestClient {
    TestClient::welcome(world.connect().await, Some(token)).await.unwrap()
}

/// Another table.
fn other(name: &str) -> TableConfig {
    TableConfig { name: name.into(), ..table() }
}

/// The first id of a sample.
async fn sampled_id(client: &mut TestClient) -> u64 {
    match client.ask(sample(1), 0).await.unwrap() {
        replay_wire::ReplyBody::Sampled(sampled) => sampled.items[0].id,
        other => panic!("expected a sample, got {}", other.name()),
    }
}

/// A request that the role may make; there is no lease to change.
fn granted(answer: replay_link::error::Result<replay_wire::ReplyBody>) {
    if let Err(error) = answer {
        assert_eq!(error.code(), ErrorCode::Lease, "{error}");
    }
}

#[test]
fn each_role_may_make_its_requests_and_no_others() {
    World::run(50, with_roles(config(table())), |world| async move {
        let mut actor = as_role(&world, ACTOR).await;
        actor.open(1).await;
        let pushed = RequestBody::Push(push(1, 1, 1, 0, &[1, 2, 3]));
        actor.ask(pushed, 0).await.unwrap();
        let get = || RequestBody::GetParameters(GetParameters { name: "policy".into(), newer_than: 0, writer: 0 });
        let of_actors = || {
            [
                RequestBody::DescribeTable(TABLE.into()),
                RequestBody::Stats,
                RequestBody::List,
                get(),
                // A program may name the tables that it uses.
                RequestBody::CreateTable(table()),
            ]
        };
        let mut learner = as_role(&world, LEARNER).await;
        let id = sampled_id(&mut learner).await;
        let of_learners = |table: &str| {
            [
                sample(1),
                RequestBody::CreateTable(other(table)),
                RequestBody::UpdatePriorities(UpdatePriorities { ids: vec![id], priorities: vec![2.0] }),
                RequestBody::PutParameters(PutParameters {
                    version: 0,
                    id: 1,
                    name: "policy".into(),
                    bytes: parameters(8),
                }),
                RequestBody::ReadSteps(ReadSteps { from: ReadPosition::default(), bytes: 1 }),
                RequestBody::ChangeLease(ChangeLease { lease: 1, begin: false }),
                RequestBody::ReportCorrupt(ReportCorrupt { id, reason: "does not decode".into() }),
            ]
        };
        let of_operators = || {
            [
                RequestBody::EmptyTable(TABLE.into()),
                RequestBody::DropTable("second".into()),
                RequestBody::DropParameters("policy".into()),
            ]
        };
        let mut operator = as_role(&world, OPERATOR).await;
        for request in of_actors() {
            for client in [&mut actor, &mut learner, &mut operator] {
                client.ask(request.clone(), 0).await.unwrap();
            }
        }
        for request in of_learners("first") {
            let name = request.name();
            let (code, message) = refused(actor.ask(request, 0).await);
            assert_eq!(code, ErrorCode::Forbidden);
            let parts = ["actor", name, "--learner-token-file", "--token-file"];
            assert!(parts.iter().all(|part| message.contains(part)), "{message}");
        }
        assert_eq!(world.stats()["parameters"].as_object().unwrap().len(), 0);
        assert_eq!(world.table_stat("items"), 3);
        for request in of_learners("second") {
            granted(learner.ask(request, 0).await);
        }
        for request in of_operators() {
            let name = request.name();
            for (client, role) in [(&mut actor, "actor"), (&mut learner, "learner")] {
                let (code, message) = refused(client.ask(request.clone(), 0).await);
                assert_eq!(code, ErrorCode::Forbidden);
                let parts = [role, name, "--token-file"];
                assert!(parts.iter().all(|part| message.contains(part)), "{message}");
            }
        }
        assert_eq!(world.table_stat("items"), 2);
        for request in of_learners("third").into_iter().chain(of_operators()) {
            granted(operator.ask(request, 0).await);
        }
        // A refusal ends no connection.
        let again = RequestBody::Push(push(1, 1, 2, 3, &[4]));
        actor.ask(again, 0).await.unwrap();
        assert_eq!(world.table_stat("items"), 1);
    });
}

#[test]
fn extensions_are_for_learners() {
    World::run(51, with_roles(config(table())), |world| async move {
        let join = || RequestBody::CallExtension(Extension { name: "adder".into(), message: "1".into() });
        for (token, expected) in [
            (ACTOR, ErrorCode::Forbidden),
            // This server has none.
            (LEARNER, ErrorCode::Config),
        ] {
            let reply = as_role(&world, token).await.ask(join(), 0).await;
            assert_eq!(refused(reply).0, expected);
        }
    });
}

#[test]
fn an_actor_hears_of_a_table_that_differs() {
    World::run(52, with_roles(config(table())), |world| async move {
        let mut actor = as_role(&world, ACTOR).await;
        let wider = TableConfig { capacity: 7, ..table() };
        let reply = actor.ask(RequestBody::CreateTable(wider), 0).await;
        assert_eq!(refused(reply).0, ErrorCode::TableDiffers);
    });
}

#[test]
fn without_the_operators_token_a_token_is_still_needed() {
    let config = ServerConfig { token: None, ..with_roles(config(table())) };
    World::run(53, config, |world| async move {
        as_role(&world, LEARNER).await.stats().await;
        for token in [None, Some(OPERATOR)] {
            let refusal = TestClient::welcome(world.connect().await, token).await;
            assert_eq!(refused(refusal.map(drop)).0, ErrorCode::Authentication);
        }
    });
}
