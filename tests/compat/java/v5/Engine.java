import com.google.common.collect.ImmutableMap;
import java.io.IOException;
import java.lang.reflect.Field;
import java.nio.file.Path;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.broker.BrokerController;
import org.apache.rocketmq.broker.failover.EscapeBridge;
import org.apache.rocketmq.broker.offset.ConsumerOffsetManager;
import org.apache.rocketmq.broker.schedule.ScheduleMessageService;
import org.apache.rocketmq.broker.subscription.SubscriptionGroupManager;
import org.apache.rocketmq.broker.topic.TopicConfigManager;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.TopicAttributes;
import org.apache.rocketmq.common.attribute.AttributeUtil;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExtBrokerInner;
import org.apache.rocketmq.common.topic.TopicValidator;
import org.apache.rocketmq.remoting.netty.NettyServerConfig;
import org.apache.rocketmq.remoting.protocol.subscription.SubscriptionGroupConfig;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.MessageStore;
import org.apache.rocketmq.store.PutMessageResult;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.store.stats.BrokerStatsManager;
import sun.misc.Unsafe;

/** What is particular to 5: how a store is made, and the broker's tables under config/. */
final class Engine {
    private Engine() {}

    static DefaultMessageStore make(MessageStoreConfig config) throws IOException {
        config.setTimerWheelEnable(false);
        return new DefaultMessageStore(
            config, new BrokerStatsManager("compat", false), (a, b, c, d, e, f, g) -> {}, new BrokerConfig(),
            new ConcurrentHashMap<>());
    }

    /** Sends a delayed message to its queue, as the broker does before it calls the store. */
    static void delay(MessageExtBrokerInner message) {
        if (message.getDelayTimeLevel() > 0) {
            MessageAccessor.putProperty(message, MessageConst.PROPERTY_REAL_TOPIC, message.getTopic());
            MessageAccessor.putProperty(
                message, MessageConst.PROPERTY_REAL_QUEUE_ID, String.valueOf(message.getQueueId()));
            message.setPropertiesString(MessageDecoder.messageProperties2String(message.getProperties()));
            message.setTopic(TopicValidator.RMQ_SYS_SCHEDULE_TOPIC);
            message.setQueueId(message.getDelayTimeLevel() - 1);
        }
    }

    /** Delivers what is due of the delayed messages, as a broker does, and writes delayOffset.json. */
    static void deliver(DefaultMessageStore store, long millis) throws Exception {
        store.getMessageStoreConfig().setEnableScheduleMessageStats(false);
        Field field = Unsafe.class.getDeclaredField("theUnsafe");
        field.setAccessible(true);
        Broker broker = (Broker) ((Unsafe) field.get(null)).allocateInstance(Broker.class);
        broker.store = store;
        ScheduleMessageService schedule = new ScheduleMessageService(broker);
        if (!schedule.load()) {
            throw new IOException("RocketMQ cannot load " + schedule.configFilePath());
        }
        schedule.start();
        Thread.sleep(millis);
        schedule.stop();
        schedule.persist();
    }

    /** A broker that has nothing but a store: its constructor, which would open ports, never runs. */
    private static final class Broker extends BrokerController {
        DefaultMessageStore store;

        private Broker() {
            super(null, (NettyServerConfig) null, null, null);
        }

        @Override
        public MessageStore getMessageStore() {
            return store;
        }

        @Override
        public MessageStoreConfig getMessageStoreConfig() {
            return store.getMessageStoreConfig();
        }

        @Override
        public BrokerConfig getBrokerConfig() {
            return store.getBrokerConfig();
        }

        @Override
        public EscapeBridge getEscapeBridge() {
            return new EscapeBridge(this) {
                @Override
                public PutMessageResult putMessage(MessageExtBrokerInner message) {
                    return store.putMessage(message);
                }

                @Override
                public CompletableFuture<PutMessageResult> asyncPutMessage(MessageExtBrokerInner message) {
                    return store.asyncPutMessage(message);
                }
            };
        }
    }

    static List<Table> tables(Path config) {
        TopicConfigManager topics = new TopicConfigManager();
        SubscriptionGroupManager groups = new SubscriptionGroupManager();
        ConsumerOffsetManager offsets = new ConsumerOffsetManager();
        return List.of(
            new Table(config.resolve("topics.json"), "topic", topics::decode, topics::encode, command -> {
                Table.putTopic(topics.getTopicConfigTable(), command);
                topics.getTopicConfigTable().get(command.get("name")).setAttributes(AttributeUtil.alterCurrentAttributes(
                    true, TopicAttributes.ALL, ImmutableMap.of(), ImmutableMap.copyOf(command.properties())));
                topics.getDataVersion().nextVersion();
            }),
            new Table(config.resolve("subscriptionGroup.json"), "group", groups::decode, groups::encode, command -> {
                SubscriptionGroupConfig group = new SubscriptionGroupConfig();
                group.setGroupName(command.get("name"));
                group.setRetryMaxTimes(command.number("retries", 16));
                groups.getSubscriptionGroupTable().put(group.getGroupName(), group);
                groups.getDataVersion().nextVersion();
            }),
            new Table(config.resolve("consumerOffset.json"), "offset", offsets::decode, offsets::encode, command ->
                Table.putOffset(offsets.getOffsetTable(), command)));
    }
}
