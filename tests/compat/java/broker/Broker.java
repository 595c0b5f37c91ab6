import com.alibaba.fastjson2.JSON;
import io.netty.channel.ChannelHandlerContext;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.Executors;
import java.util.function.BooleanSupplier;
import org.apache.rocketmq.broker.BrokerController;
import org.apache.rocketmq.client.AccessChannel;
import org.apache.rocketmq.client.trace.TraceContext;
import org.apache.rocketmq.client.trace.TraceDataEncoder;
import org.apache.rocketmq.client.trace.TraceView;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.sysflag.MessageSysFlag;
import org.apache.rocketmq.remoting.CommandCustomHeader;
import org.apache.rocketmq.remoting.netty.NettyClientConfig;
import org.apache.rocketmq.remoting.netty.NettyRemotingClient;
import org.apache.rocketmq.remoting.netty.NettyRequestProcessor;
import org.apache.rocketmq.remoting.netty.NettyServerConfig;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;
import org.apache.rocketmq.remoting.protocol.RequestCode;
import org.apache.rocketmq.remoting.protocol.header.AckMessageRequestHeader;
import org.apache.rocketmq.remoting.protocol.header.CheckTransactionStateRequestHeader;
import org.apache.rocketmq.remoting.protocol.header.EndTransactionRequestHeader;
import org.apache.rocketmq.remoting.protocol.header.ExtraInfoUtil;
import org.apache.rocketmq.remoting.protocol.header.PopMessageRequestHeader;
import org.apache.rocketmq.remoting.protocol.header.PopMessageResponseHeader;
import org.apache.rocketmq.remoting.protocol.header.RecallMessageRequestHeader;
import org.apache.rocketmq.remoting.protocol.header.SendMessageRequestHeader;
import org.apache.rocketmq.remoting.protocol.header.SendMessageResponseHeader;
import org.apache.rocketmq.remoting.protocol.heartbeat.HeartbeatData;
import org.apache.rocketmq.remoting.protocol.heartbeat.ProducerData;
import org.apache.rocketmq.remoting.protocol.subscription.SubscriptionGroupConfig;
import org.apache.rocketmq.store.GetMessageResult;
import org.apache.rocketmq.store.MessageStore;
import org.apache.rocketmq.store.config.MessageStoreConfig;

/**
 * A broker of Apache RocketMQ 5 with a client of its own, for tests/compat: {@code Broker DIR LOG_BYTES QUEUE_BYTES
 * TIMER_LOG_BYTES ROLL_S}. Commands come as the driver's do, a line each, and each is answered with a line of JSON. The
 * end of the input is an orderly stop. Bodies are text.
 */
public final class Broker {
    private static final String NAME = "compat";
    private static final int ENOUGH_MS = 5_000;

    private final BrokerController broker;
    private final NettyRemotingClient client = new NettyRemotingClient(new NettyClientConfig());
    private final Set<String> checked = ConcurrentHashMap.newKeySet(); // bodies of halves that it was asked about
    private final Set<String> wanted = ConcurrentHashMap.newKeySet(); // of those to be committed then
    private final Map<String, AckMessageRequestHeader> received = new HashMap<>(); // by body
    private String address;

    private Broker(String[] words) throws Exception {
        BrokerConfig config = new BrokerConfig();
        config.setBrokerName(NAME);
        config.setBrokerClusterName(NAME);
        config.setBrokerIP1("127.0.0.1");
        config.setRecallMessageEnable(true);
        config.setTransactionTimeOut(500);
        config.setTransactionCheckInterval(2_000);
        config.setTransactionOpBatchInterval(100); // until then an answered half may be asked about once more
        config.setTransactionCheckMax(1_000); // on a busy machine a test takes long
        MessageStoreConfig store = new MessageStoreConfig();
        Path root = Path.of(words[0]);
        store.setStorePathRootDir(root.toString());
        store.setStorePathCommitLog(root.resolve("commitlog").toString());
        store.setMappedFileSizeCommitLog(Integer.parseInt(words[1]));
        store.setMappedFileSizeConsumeQueue(Integer.parseInt(words[2]));
        store.setMappedFileSizeTimerLog(Integer.parseInt(words[3]));
        store.setTimerRollWindowSlot(Integer.parseInt(words[4]));
        store.setMaxHashSlotNum(100);
        store.setMaxIndexNum(400);
        store.setHaListenPort(0);
        store.setDiskMaxUsedSpaceRatio(99);
        store.setCleanFileForciblyEnable(false);
        broker = new BrokerController(config, new NettyServerConfig(), new NettyClientConfig(), store);
    }

    public static void main(String[] words) {
        PrintStream out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        System.setOut(System.err); // whatever RocketMQ prints is none of our answers
        try {
            new Broker(words).run(out);
            System.exit(0);
        } catch (Throwable error) {
            error.printStackTrace();
            System.exit(1);
        }
    }

    private void run(PrintStream out) throws Exception {
        if (!broker.initialize()) {
            throw new IllegalStateException("RocketMQ cannot load its store");
        }
        broker.start();
        address = "127.0.0.1:" + broker.getRemotingServer().localListenPort();
        client.registerProcessor(RequestCode.CHECK_TRANSACTION_STATE, new NettyRequestProcessor() {
            @Override
            public RemotingCommand processRequest(ChannelHandlerContext context, RemotingCommand request)
                throws Exception {
                MessageExt half = MessageDecoder.decode(ByteBuffer.wrap(request.getBody()));
                checked.add(text(half.getBody()));
                if (wanted.remove(text(half.getBody()))) {
                    commit(half, (CheckTransactionStateRequestHeader) request.decodeCommandCustomHeader(
                        CheckTransactionStateRequestHeader.class));
                }
                return null;
            }

            @Override
            public boolean rejectRequest() {
                return false;
            }
        }, Executors.newSingleThreadExecutor());
        client.start();
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            Map<String, Object> answer = new LinkedHashMap<>();
            answer(new Command(line), answer);
            out.println(JSON.toJSONString(answer));
        }
        client.shutdown();
        broker.shutdown();
    }

    /** One line of the input: a name, then fields. */
    private static final class Command {
        final String name;
        final Map<String, String> fields = new LinkedHashMap<>();

        Command(String line) {
            String[] words = line.split("\t");
            name = words[0];
            for (String word : Arrays.asList(words).subList(1, words.length)) {
                int equals = word.indexOf('=');
                fields.put(word.substring(0, equals), word.substring(equals + 1));
            }
        }

        String get(String field) {
            return fields.getOrDefault(field, "");
        }

        int number(String field) {
            return Integer.parseInt(fields.getOrDefault(field, "0"));
        }
    }

    private void answer(Command command, Map<String, Object> answer) throws Exception {
        switch (command.name) {
            case "topic" -> broker.getTopicConfigManager().updateTopicConfig(
                new TopicConfig(command.get("name"), command.number("queues"), command.number("queues"), 6));
            case "group" -> {
                SubscriptionGroupConfig group = new SubscriptionGroupConfig();
                group.setGroupName(command.get("name"));
                broker.getSubscriptionGroupManager().updateSubscriptionGroupConfig(group);
            }
            case "produce" -> beat(command.get("group"));
            case "send" -> send(command, answer);
            case "commit" -> wanted.add(command.get("body"));
            case "recall" -> recall(command);
            case "pop" -> answer.put("bodies", pop(command));
            case "ack" -> ack(command);
            case "checks" -> {
                until(command, () -> checked.contains(command.get("body")));
                answer.put("bodies", List.copyOf(checked));
            }
            case "until" -> until(command, () -> end(command.get("topic"), command.number("queue")) >= command.number("count"));
            case "sleep" -> Thread.sleep(command.number("ms"));
            case "messages" -> answer.put("messages", messages(command.get("topic"), command.number("queue")));
            case "offset" -> answer.put("offset", broker.getConsumerOffsetManager().queryOffset(
                command.get("group"), command.get("topic"), command.number("queue")));
            case "trace" -> trace(command, answer);
            default -> throw new IllegalArgumentException(command.name);
        }
    }

    private RemotingCommand ask(int code, CommandCustomHeader header, byte[] body) throws Exception {
        RemotingCommand request = RemotingCommand.createRequestCommand(code, header);
        request.setBody(body);
        return client.invokeSync(address, request, ENOUGH_MS);
    }

    private RemotingCommand done(RemotingCommand answer) {
        if (answer.getCode() != 0) {
            throw new IllegalStateException(answer.getCode() + " " + answer.getRemark());
        }
        return answer;
    }

    private void beat(String group) throws Exception {
        HeartbeatData heartbeat = new HeartbeatData();
        heartbeat.setClientID("compat");
        ProducerData producer = new ProducerData();
        producer.setGroupName(group);
        heartbeat.setProducerDataSet(Set.of(producer));
        done(ask(RequestCode.HEART_BEAT, null, heartbeat.encode()));
    }

    private void send(Command command, Map<String, Object> answer) throws Exception {
        Map<String, String> properties = new HashMap<>();
        command.fields.forEach((name, value) -> {
            if (name.startsWith("p:")) {
                properties.put(name.substring(2), value);
            }
        });
        SendMessageRequestHeader header = new SendMessageRequestHeader();
        header.setProducerGroup("compat");
        header.setTopic(command.get("topic"));
        header.setDefaultTopic("TBW102");
        header.setDefaultTopicQueueNums(1);
        header.setQueueId(command.number("queue"));
        header.setSysFlag(properties.containsKey("TRAN_MSG") ? MessageSysFlag.TRANSACTION_PREPARED_TYPE : 0);
        header.setBornTimestamp(System.currentTimeMillis());
        header.setFlag(0);
        header.setProperties(MessageDecoder.messageProperties2String(properties));
        header.setReconsumeTimes(0);
        byte[] body = command.get("body").getBytes(StandardCharsets.UTF_8);
        RemotingCommand got = done(ask(RequestCode.SEND_MESSAGE, header, body));
        SendMessageResponseHeader sent =
            (SendMessageResponseHeader) got.decodeCommandCustomHeader(SendMessageResponseHeader.class);
        answer.put("offset", sent.getQueueOffset());
        answer.put("id", sent.getMsgId());
        answer.put("handle", sent.getRecallHandle());
    }

    private void commit(MessageExt half, CheckTransactionStateRequestHeader asked) throws Exception {
        EndTransactionRequestHeader header = new EndTransactionRequestHeader();
        header.setTopic(half.getProperty(MessageConst.PROPERTY_REAL_TOPIC));
        header.setProducerGroup(half.getProperty(MessageConst.PROPERTY_PRODUCER_GROUP));
        header.setTranStateTableOffset(asked.getTranStateTableOffset());
        header.setCommitLogOffset(asked.getCommitLogOffset());
        header.setCommitOrRollback(MessageSysFlag.TRANSACTION_COMMIT_TYPE);
        header.setFromTransactionCheck(true);
        header.setMsgId(asked.getMsgId());
        header.setTransactionId(asked.getTransactionId());
        // A call without an answer, for RocketMQ.
        RemotingCommand request = RemotingCommand.createRequestCommand(RequestCode.END_TRANSACTION, header);
        client.invokeOneway(address, request, ENOUGH_MS);
    }

    private void recall(Command command) throws Exception {
        RecallMessageRequestHeader header = new RecallMessageRequestHeader();
        header.setProducerGroup("compat");
        header.setTopic(command.get("topic"));
        header.setRecallHandle(command.get("handle"));
        done(ask(RequestCode.RECALL_MESSAGE, header, null));
    }

    /** The bodies of what the group receives; their handles are kept. */
    private List<String> pop(Command command) throws Exception {
        PopMessageRequestHeader header = new PopMessageRequestHeader();
        header.setConsumerGroup(command.get("group"));
        header.setTopic(command.get("topic"));
        header.setQueueId(-1);
        header.setMaxMsgNums(command.number("count"));
        header.setInvisibleTime(command.number("ms"));
        header.setPollTime(0);
        header.setBornTime(System.currentTimeMillis());
        header.setInitMode(0); // from the first message on
        header.setOrder(false);
        RemotingCommand got = ask(RequestCode.POP_MESSAGE, header, null);
        if (got.getCode() != 0) { // nothing is there
            return List.of();
        }
        PopMessageResponseHeader head =
            (PopMessageResponseHeader) got.decodeCommandCustomHeader(PopMessageResponseHeader.class);
        Map<String, Long> starts = ExtraInfoUtil.parseStartOffsetInfo(head.getStartOffsetInfo());
        List<String> bodies = new ArrayList<>();
        for (MessageExt message : MessageDecoder.decodes(ByteBuffer.wrap(got.getBody()))) {
            String handle = message.getProperty(MessageConst.PROPERTY_POP_CK); // of one that comes again
            if (handle == null) {
                long start = starts.get(ExtraInfoUtil.getStartOffsetInfoMapKey(message.getTopic(), message.getQueueId()));
                handle = ExtraInfoUtil.buildExtraInfo(start, head.getPopTime(), head.getInvisibleTime(),
                    head.getReviveQid(), message.getTopic(), NAME, message.getQueueId(), message.getQueueOffset());
            }
            String[] parts = ExtraInfoUtil.split(handle);
            AckMessageRequestHeader ack = new AckMessageRequestHeader();
            ack.setConsumerGroup(command.get("group"));
            ack.setTopic(ExtraInfoUtil.getRealTopic(parts, message.getTopic(), command.get("group")));
            ack.setQueueId(message.getQueueId());
            ack.setOffset(ExtraInfoUtil.getQueueOffset(parts));
            ack.setExtraInfo(handle);
            String body = text(message.getBody());
            received.put(body, ack);
            bodies.add(body);
        }
        return bodies;
    }

    private void ack(Command command) throws Exception {
        done(ask(RequestCode.ACK_MESSAGE, received.get(command.get("body")), null));
    }

    private void until(Command command, BooleanSupplier condition) throws Exception {
        long end = System.currentTimeMillis() + command.number("ms");
        while (!condition.getAsBoolean()) {
            if (System.currentTimeMillis() > end) {
                throw new IllegalStateException("in vain: " + command.name + command.fields + " " + checked);
            }
            Thread.sleep(20);
        }
    }

    private long end(String topic, int queue) {
        try {
            return broker.getMessageStore().getMaxOffsetInQueue(topic, queue);
        } catch (Exception error) {
            throw new IllegalStateException(error);
        }
    }

    /** Of each message of a queue its body, and when it was stored. */
    private List<Object> messages(String topic, int queue) {
        MessageStore store = broker.getMessageStore();
        List<Object> found = new ArrayList<>();
        for (long offset = store.getMinOffsetInQueue(topic, queue); offset < end(topic, queue); ) {
            GetMessageResult got = store.getMessage("compat", topic, queue, offset, 32, null);
            for (ByteBuffer buffer : got.getMessageBufferList()) {
                MessageExt message = MessageDecoder.decode(buffer, true);
                found.add(List.of(text(message.getBody()), message.getStoreTimestamp()));
            }
            offset = got.getNextBeginOffset();
            got.release();
        }
        return found;
    }

    /** What RocketMQ reads of the trace records in a body, and how it writes them itself. */
    private static void trace(Command command, Map<String, Object> answer) {
        String body = text(HexFormat.of().parseHex(command.get("hex")));
        List<Object> contexts = new ArrayList<>();
        List<String> again = new ArrayList<>();
        for (TraceContext context : TraceDataEncoder.decoderFromTraceDataString(body)) {
            Map<String, Object> found = new LinkedHashMap<>();
            found.put("type", context.getTraceType().toString());
            found.put("time", context.getTimeStamp());
            found.put("group", context.getGroupName());
            found.put("cost", context.getCostTime());
            found.put("success", context.isSuccess());
            found.put("request", context.getRequestId());
            found.put("code", context.getContextCode());
            found.put("beans", context.getTraceBeans().stream().map(bean -> {
                Map<String, Object> one = new LinkedHashMap<>();
                one.put("topic", bean.getTopic());
                one.put("id", bean.getMsgId());
                one.put("offset_id", bean.getOffsetMsgId());
                one.put("tags", bean.getTags());
                one.put("keys", bean.getKeys());
                one.put("host", bean.getStoreHost());
                one.put("bytes", bean.getBodyLength());
                one.put("retries", bean.getRetryTimes());
                return one;
            }).toList());
            contexts.add(found);
            context.setAccessChannel(AccessChannel.LOCAL); // what their clients have, and records do not say
            again.add(TraceDataEncoder.encoderFromContextBean(context).getTransData());
        }
        answer.put("contexts", contexts);
        answer.put("again", again);
        MessageExt message = new MessageExt();
        message.setBody(body.getBytes(StandardCharsets.UTF_8));
        List<Object> views = new ArrayList<>();
        for (TraceView view : TraceView.decodeFromTraceTransData(command.get("id"), message)) {
            views.add(List.of(view.getMsgType(), String.valueOf(view.getTopic()), String.valueOf(view.getMsgId()),
                String.valueOf(view.getGroupName()), String.valueOf(view.getStatus()), view.getCostTime()));
        }
        answer.put("views", views);
    }

    private static String text(byte[] bytes) {
        return new String(bytes, StandardCharsets.UTF_8);
    }
}
