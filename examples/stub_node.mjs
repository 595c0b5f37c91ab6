// CometMQ with bare stubs: @grpc/grpc-js, and @grpc/proto-loader over proto/cometmq/v1; no build step.
//
//     npm ci --prefix examples
//     node examples/stub_node.mjs --namesrv 127.0.0.1:9876 --topic Hello
//
// Finds the topic's route, sends, reads, holds where nothing is left until a second task sends more, commits, reads
// the commit back, reads in order under a lock, goes on where the group is reset to, sends one message back until it is
// a dead letter, receives and acknowledges (POP), sends messages for later and takes one back, ends transactions, one of
// them when the broker asks about it, and shows what a refusal says. The topic has to exist (`cometmq topic create Hello`).
// stub_python.py is the same in Python; docs/protocol.md tells what the messages of the contract share.

import { setTimeout as sleep } from 'node:timers/promises'
import { fileURLToPath } from 'node:url'
import { parseArgs } from 'node:util'

import grpc from '@grpc/grpc-js'
import protoLoader from '@grpc/proto-loader'

const TIMEOUT_MS = 3_000 // of a call; without one a call waits for ever
const HOLD_MS = 10_000
const POLL_MS = 500 // between two pulls where no pullhold can be asked
// gRPC's own limit, 4 MiB, is too small for an answer with one large message: it would be asked for again and again.
const OPTIONS = { 'grpc.max_receive_message_length': 64 * 1024 * 1024 }

const definition = protoLoader.loadSync(
  ['namesrv', 'broker', 'hold'].map((file) => `cometmq/v1/${file}.proto`),
  {
    includeDirs: [fileURLToPath(new URL('../proto', import.meta.url))],
    keepCase: true, // names as in the contract
    longs: String, // 64 bits do not fit a number; a position goes back as it came
    enums: String,
    defaults: true, // zeros and empty lists are there; an absent message is null, an absent `optional` field undefined
  },
)
const api = grpc.loadPackageDefinition(definition).cometmq.v1

const connect = (Service, address) => new Service(address, grpc.credentials.createInsecure(), OPTIONS)

/** One unary call. */
const call = (client, method, request, timeoutMs = TIMEOUT_MS) =>
  new Promise((resolve, reject) => {
    client[method](request, { deadline: Date.now() + timeoutMs }, (error, answer) =>
      error ? reject(error) : resolve(answer),
    )
  })

/** What CometMQ says about a failed call; null: gRPC itself failed, e.g. nobody answered. */
function refusal(error) {
  const [value] = error.metadata?.get('cometmq-error-bin') ?? []
  return value ? api.Error.deserialize(value) : null // proto-loader 0.8 or newer
}

// --- where things are ------------------------------------------------------------------------------------------------

/**
 * A place where the topic can be written: one broker group's share of it. Queue numbers, offsets and commits belong to
 * the broker group: a topic on two broker groups has a queue 0 on each, and a consumer reads both.
 */
async function find(namesrv, topic) {
  // Any name server will do; each knows the whole cluster. A real client asks the next one when the first does not
  // answer, and asks again from time to time: writers change.
  const names = connect(api.NameService, namesrv.split(';')[0])
  const { route } = await call(names, 'QueryRoute', { topic })
  for (const group of route.groups) {
    console.log(`route: ${topic} on broker group ${group.broker_group}, ${group.topic.read_queue_count} queues`)
  }
  const writerOf = (group) => group.members.find((member) => member.role === 'MEMBER_ROLE_WRITER')
  const group = route.groups.find((group) => group.topic.permission & 2 && writerOf(group)) // 2: may be written
  if (!group) throw new Error(`${topic}: no writer now; ask for the route again later`)
  const writer = writerOf(group)
  // Those of another cluster need not know this broker. Several: take any, and the next after an error. None: poll.
  const { addresses } = await call(names, 'ListPullholds', { cluster: writer.cluster })
  console.log(`route: writer ${writer.address}, pullholds ${addresses.join(' ') || 'none'}`)
  names.close()
  return {
    topic,
    broker_group: group.broker_group,
    broker: connect(api.BrokerService, writer.address),
    admin: connect(api.BrokerAdminService, writer.internal_address), // for operators: see reset()
    pullhold: addresses.length ? connect(api.HoldService, addresses[0]) : null,
  }
}

// --- send ------------------------------------------------------------------------------------------------------------

/**
 * Store messages together or not at all; where the last one is. Without an answer (UNAVAILABLE, DEADLINE_EXCEEDED)
 * they may be stored or not. With a property UNIQ_KEY of your own in each, the same call made again within a minute
 * stores nothing twice.
 */
async function send(place, bodies, fields = {}) {
  const messages = bodies.map((body, number) => ({
    topic: place.topic, // without queue_id: the broker takes one queue for the whole call
    body: Buffer.from(body),
    tag: 'greeting',
    keys: [`key-${number}`],
    properties: { language: 'JavaScript' },
    ...fields,
  }))
  const { sent } = await call(place.broker, 'Send', { messages })
  for (const { message_id, queue, position } of sent) {
    console.log(`sent: ${message_id} to queue ${queue.queue_id} @ ${position.offset}`)
  }
  return sent.at(-1)
}

// --- read ------------------------------------------------------------------------------------------------------------

/**
 * The messages at a position, and the position to go on at; waits where there is nothing yet. No messages are no
 * error: the wait was over, or the position had to be moved. Call it again.
 */
async function read(place, queue, position, tags = []) {
  const pull = { queue, position, filter: { tags }, form: 'MESSAGE_FORM_MESSAGES' }
  try {
    let answer = await call(place.broker, 'Pull', pull)
    if (answer.status === 'PULL_STATUS_NOT_FOUND') {
      pull.position = answer.next_position // the same, with the generation
      answer = (await hold(place, pull)) ?? answer
    }
    // Whatever the status: the next pull is at next_position. Broker and pullhold filter by a hash of the tag, so that
    // another tag may slip through; who asked for tags has to compare.
    const messages = answer.messages.filter(({ tag }) => !tags.length || tags.includes(tag))
    return { messages, position: answer.next_position }
  } catch (error) {
    const fence = refusal(error)?.fence
    if (!fence) throw error
    return { messages: [], position: fence } // POSITION_FENCED: what stood there is gone, go on at the fence
  }
}

/** Wait at a pullhold until the pull finds something; null: it cannot be asked, so we slept. */
async function hold(place, pull) {
  if (place.pullhold) {
    console.log(`hold: ${pull.queue.topic} queue ${pull.queue.queue_id} @ ${pull.position.offset} has nothing yet`)
    const request = { broker_group: place.broker_group, pull, hold_ms: HOLD_MS }
    try {
      // The deadline is longer than the hold, else the call fails at its end.
      return (await call(place.pullhold, 'Hold', request, HOLD_MS + TIMEOUT_MS)).pull
    } catch (error) {
      console.log(`hold: ${error.message}`) // what is wrong with the pull the broker will tell
    }
  }
  await sleep(POLL_MS)
  return null
}

/**
 * Print what stands in the queue up to a message; the position behind it. A message that was sent is not always there
 * at once: topics with asynchronous flush show it to readers when it is on disk, some milliseconds later.
 */
async function readUntil(place, position, last) {
  while (BigInt(position.offset) <= BigInt(last.position.offset)) {
    const found = await read(place, last.queue, position, ['greeting'])
    for (const { queue_offset, body } of found.messages) {
      // bit 0 of sys_flag: the producer compressed the body, see docs/format/record.md
      console.log(`read: ${queue_offset}: ${body.subarray(0, 40)}`)
    }
    position = found.position
  }
  return position
}

/**
 * Offsets of the messages for whose properties an SQL92 expression is true, from the first one on. One answer may have
 * none of many: it looks at 1 MiB, then the next pull goes on.
 */
async function readMatching(place, queue, sql) {
  const pull = { queue, filter: { sql }, form: 'MESSAGE_FORM_MESSAGES' }
  const offsets = []
  for (;;) {
    const answer = await call(place.broker, 'Pull', pull)
    if (answer.status === 'PULL_STATUS_NOT_FOUND') return offsets
    offsets.push(...answer.messages.map(({ queue_offset }) => queue_offset))
    pull.position = answer.next_position
  }
}

// --- commit ----------------------------------------------------------------------------------------------------------

/** What became of one queue among many; the call itself went well. */
function checked(result) {
  if (result.error) throw new Error(`${result.error.name}: ${result.error.message}`)
  return result
}

/** Where the group goes on in a queue, its beginning if it has never committed there; and its newest reset there. */
async function committed(place, group, queue) {
  const { results } = await call(place.broker, 'QueryOffsets', { group, queues: [queue] })
  const { position, reset_number } = checked(results[0])
  return { position: position ?? { generation: 0, offset: 0 }, reset_number }
}

/**
 * All messages before the position are done. The generation goes back as it came, and so does the number of the newest
 * reset that we know.
 */
const commit = async (place, group, queue, position, numbers) =>
  (await call(place.broker, 'CommitOffsets', { group, commits: [{ queue, position, ...numbers }] })).results[0]

// --- in order: one client at a time ----------------------------------------------------------------------------------

/**
 * Lock a queue for 15 s, counted from when we ask. A client that goes on asks again each 5 s, and handles nothing once
 * its time is over: another client may have the queue then.
 */
const lock = async (place, group, client_id, queue) =>
  (await call(place.broker, 'LockQueues', { group, client_id, queues: [queue] })).results[0]

/** Commit before. */
const unlock = (place, group, client_id, queue) =>
  call(place.broker, 'UnlockQueues', { group, client_id, queues: [queue] })

/**
 * Two clients of a group want the same queue. Pulls and commits carry the number of the lock, so that who lost it does
 * no harm.
 */
async function readInOrder(place, group, { queue, position }, reset_number) {
  const { lock_number } = await lock(place, group, 'client-1', queue)
  const refused = await lock(place, group, 'client-2', queue)
  console.log(`locked: client-1 has the queue, client-2 gets ${refused.error.name}`)
  const pull = { group, queue, position, lock_number, form: 'MESSAGE_FORM_MESSAGES' }
  const { count, next_position } = await call(place.broker, 'Pull', pull)
  const numbers = { lock_number, reset_number }
  const done = checked(await commit(place, group, queue, next_position, numbers))
  console.log(`locked: client-1 reads ${count}, commits ${done.position.offset}`)
  await unlock(place, group, 'client-1', queue)
  await lock(place, group, 'client-2', queue)
  const late = await commit(place, group, queue, next_position, numbers)
  console.log(`locked: client-2 has the queue, client-1 gets ${late.error.name}`)
  await unlock(place, group, 'client-2', queue)
}

// --- a reset: an operator lets the group go on elsewhere --------------------------------------------------------------

/**
 * Let the group go on at an offset, and see what its members see. The call is for operators: it goes to the internal
 * port, and where a cluster has a secret it needs the proof.
 *
 * Members that hold a JoinGroup stream are told within a second. A commit that was on its way is refused in any case,
 * and tells where to go on and the number that commits need from now on.
 */
async function reset(place, group, queue, offset, reset_number) {
  const before = (await committed(place, group, queue)).position
  const request = { group, topic: queue.topic, queue_ids: [queue.queue_id], offset }
  await call(place.admin, 'ResetOffsets', request)
  const late = await commit(place, group, queue, before, { reset_number })
  console.log(`reset: a late commit gets ${late.error.name}: go on at ${late.error.fence.offset}`)
  const { messages, position } = await read(place, queue, late.error.fence)
  const kept = checked(await commit(place, group, queue, position, { reset_number: late.reset_number }))
  console.log(`reset: ${messages.length} messages again, committed ${kept.position.offset}`)
}

// --- what a group cannot do now --------------------------------------------------------------------------------------

/**
 * The broker delivers the message again after the delay: 0 = 10 s, 30 s … by the number of its tries, 1 (1 s) to 18
 * (2 h), -1 = never, it is a dead letter now. Commit only after the answer.
 */
const sendBack = async (place, group, queue, position, delay_level) =>
  checked((await call(place.broker, 'SendBack', { group, items: [{ queue, position, delay_level }] })).results[0])

/** One message fails, comes again after a second, fails again, and is a dead letter then. */
async function failTwice(place, group, { queue, queue_offset }, { generation }) {
  await sendBack(place, group, queue, { generation, offset: queue_offset }, 1)
  // It comes in a topic of the group's own, which the group reads like the others.
  const retries = { topic: `%RETRY%${group}`, queue_id: 0 }
  const { position, reset_number } = await committed(place, group, retries)
  let found = { messages: [], position }
  while (!found.messages.length) found = await read(place, retries, found.position)
  const [again] = found.messages
  console.log(`again: ${again.body} of ${again.properties.RETRY_TOPIC}, sent back ${again.reconsume_times} times`)

  const failed = { generation: found.position.generation, offset: again.queue_offset }
  await sendBack(place, group, retries, failed, -1)
  checked(await commit(place, group, retries, found.position, { reset_number }))
  const dead = { topic: `%DLQ%${group}`, queue_id: 0 }
  const [bounds] = (await call(place.broker, 'QueryQueues', { queues: [dead] })).queues
  const newest = { generation: bounds.generation, offset: BigInt(bounds.max_offset) - 1n + '' }
  const { messages } = await read(place, dead, newest)
  console.log(`dead letter: ${messages[0].body}`)
}

// --- receive: each message for one member, for a time (POP) ------------------------------------------------------------

/**
 * Members of a group with mode POP share all queues. A message is its member's until it is acknowledged, or its time is
 * over: then it comes again, to any member.
 */
async function receive(place, group) {
  const request = {
    group,
    subscriptions: [{ topic: place.topic, filter: { sql: 'language IS NOT NULL' } }],
    max_count: 2,
    invisible_ms: 30_000,
    attempt_id: 'attempt-1', // without an answer: the same call again, with the same id
    form: 'MESSAGE_FORM_MESSAGES',
  }
  const [first] = (await call(place.broker, 'Receive', request)).runs
  const [run] = (await call(place.broker, 'Receive', request)).runs // the handle of the newest answer counts
  const ids = ({ messages }) => messages.map(({ message_id }) => message_id).join()
  const bodies = run.messages.map(({ body }) => `'${body}'`).join(', ')
  const once = ids(first) === ids(run) && first.attempt === run.attempt ? 'True' : 'False'
  console.log(`received: [${bodies}], attempt ${run.attempt}, once more: ${once}`)

  // The work takes longer than its time: from now on there is another handle.
  const items = [{ messages: { handle: run.handle }, invisible_ms: 60_000 }]
  const [changed] = (await call(place.broker, 'ChangeInvisibleTime', { group, items })).results
  const handles = [{ handle: run.handle }, { handle: changed.handle }]
  const [late] = (await call(place.broker, 'AckMessages', { group, items: handles })).results
  const { position } = await committed(place, group, run.queue)
  console.log(`received: the old handle gets ${late.error.name}, all is done before ${position.offset}`)
}

// --- messages that wait: for their time, or for the end of a transaction -----------------------------------------------

/**
 * One message comes after its time; another is taken back, and never comes. The position behind them. `deliver_at_ms`
 * in place of `delay_ms` names a time.
 */
async function delay(place, queue, position) {
  const common = { topic: place.topic, queue_id: queue.queue_id, tag: 'later' }
  const messages = [
    { ...common, body: Buffer.from('in a second'), delay_ms: 1_000 },
    { ...common, body: Buffer.from('never'), delay_ms: 1_500 },
  ]
  const { sent, store_time_ms } = await call(place.broker, 'Send', { messages })
  const [taken] = (await call(place.broker, 'Recall', { handles: [sent[1].recall_handle] })).results
  let found = { messages: [], position }
  while (!found.messages.length) found = await read(place, queue, found.position, ['later'])
  const [message] = found.messages
  const isLate = BigInt(message.store_time_ms) - BigInt(store_time_ms) >= 1_000n
  const said = (yes) => (yes ? 'True' : 'False')
  console.log(`delayed: ${message.body}, waited: ${said(isLate)}, other recalled: ${said(taken.recalled)}`)
  return found.position
}

/**
 * Nobody sees a half message before its transaction ends. This producer commits one by itself, and one when the broker
 * asks what became of it, as it asks any producer of the group.
 */
async function transact(place, queue, position, producer_group) {
  const messages = ['committed', 'asked about'].map((body) => ({
    topic: place.topic,
    queue_id: queue.queue_id,
    body: Buffer.from(body),
    tag: 'later',
    producer_group,
    check_immunity_s: 1, // the broker does not ask before
  }))
  const { sent } = await call(place.broker, 'Send', { messages })
  const committed = ({ half }) => ({ half, resolution: 'TRANSACTION_RESOLUTION_COMMIT' })
  checked((await call(place.broker, 'EndTransactions', { producer_group, ends: [committed(sent[0])] })).results[0])

  // A producer holds this stream open as long as it lives.
  const stream = place.broker.CheckTransactions()
  const asked = new Promise((resolve, reject) => {
    stream.on('error', reject)
    stream.on('data', ({ checks }) => checks.length && resolve(checks)) // the first response says that we have joined
  })
  stream.write({ join: { producer_group, client_id: 'client-1' } })
  const checks = await asked
  const isSecond = checks[0].half.half_offset === sent[1].half.half_offset ? 'True' : 'False'
  console.log(`checked: the second: ${isSecond}, asked ${checks[0].check_count} times`)
  stream.write({ answers: checks.map(committed) })
  const bodies = []
  let found = { messages: [], position }
  while (bodies.length < messages.length) {
    found = await read(place, queue, found.position, ['later'])
    bodies.push(...found.messages.map(({ body }) => `${body}`))
  }
  console.log(`transactions: ${bodies.join(', ')}`)
  stream.on('error', () => {}) // it ends as it was told
  stream.cancel()
}

// --- the tour --------------------------------------------------------------------------------------------------------

async function tour({ namesrv, topic, group }) {
  const place = await find(namesrv, topic)
  const last = await send(place, ['one', 'two', 'three'])
  const { queue } = last

  // Where to begin: at the commit, else at the beginning. A position of generation 0 is never fenced; 0 @ 0 is moved to
  // the first message that is left. The answers tell the generation.
  const known = await committed(place, group, queue)
  let position = await readUntil(place, known.position, last)

  const second = sleep(1_000).then(() => send(place, ['while you were waiting'], { queue_id: queue.queue_id }))
  let found = { messages: [], position }
  while (!found.messages.length) {
    found = await read(place, queue, found.position, ['greeting']) // after a hold that was in vain, the next one
  }
  position = await readUntil(place, found.position, await second)
  console.log(`held: woken by ${found.messages[0].message_id}: ${found.messages[0].body}`)

  const offsets = await readMatching(place, queue, "language IS NOT NULL AND KEYS <> 'key-1'")
  console.log(`matched: [${offsets.join(', ')}]`)

  const { reset_number } = known
  checked(await commit(place, group, queue, position, { reset_number }))
  const kept = (await committed(place, group, queue)).position
  console.log(`committed: ${group} at generation ${kept.generation}, offset ${kept.offset}`)

  await readInOrder(place, group, last, reset_number)
  await reset(place, group, queue, last.position.offset, reset_number)

  await failTwice(place, group, found.messages[0], position)
  await receive(place, `${group}-pop`)
  position = await delay(place, queue, position)
  await transact(place, queue, position, `${group}-payers`)

  try {
    await call(place.broker, 'Send', { messages: [{ topic: '../x' }] })
  } catch (error) {
    const refused = refusal(error)
    if (!refused) throw error
    console.log(`refused: ${grpc.status[error.code]}, ${refused.code} ${refused.name}, ${refused.retry}`)
    console.log(`refused: message ${refused.segment}: ${refused.message}. ${refused.advice}`)
  }
  place.broker.close()
  place.admin.close()
  place.pullhold?.close()
}

const { values } = parseArgs({
  options: {
    namesrv: { type: 'string' }, // host:port;host:port
    topic: { type: 'string', default: 'Hello' },
    group: { type: 'string', default: 'stub-node' },
  },
})
if (!values.namesrv) {
  console.error('usage: stub_node.mjs --namesrv HOST:PORT [--topic TOPIC] [--group GROUP]')
  process.exit(2)
}
try {
  await tour(values)
} catch (error) {
  console.error(refusal(error) ?? error.message)
  process.exit(1)
}
